"""The contract of a circuit, and everything that follows from it.

A circuit is a distribution over a window of n tokens x_0 .. x_(n-1) (0-based here) with r latent states. With
leaf[k, z, v] = log p(x_k = v | z, h) every circuit is a filter over log weights pi_k:

    q(x_k = v | x_<k, h) = sum_z exp(pi_k[z] + leaf[k, z, v])

A leaf may be conditioned on the token before it (`Bigram`); the marginal over a token in the middle of the window is
then not available. All arithmetic is float32 log space with the maximum subtracted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.kernels.filter import MAX_COMPONENTS, Program, advance, check_program, filter_weights
from vllm_mtpc.kernels.leaf import Bigram

# Far beyond any trained or served circuit: a damaged config must not build a tree of 10**12 regions.
MAX_WINDOW = 256
TINY = torch.finfo(torch.float32).tiny


class DraftVocabulary(NamedTuple):
    """The ids that leaves have columns for; q is 0 for all others."""

    ids: Tensor  # [columns] int64, of the target, rising
    columns: Tensor  # [V] int64, of each id; -1: none

    @classmethod
    def of(cls, ids: Tensor, vocab_size: int) -> DraftVocabulary:
        """Return the vocabulary of these ids."""
        columns = torch.full((vocab_size,), -1, dtype=torch.int64, device=ids.device)
        columns[ids] = torch.arange(len(ids), device=ids.device)
        return cls(ids, columns)

    def find(self, tokens: Tensor) -> Tensor:
        """Return the columns of ids; -1 for ids outside and for -1."""
        return self.columns[tokens.clamp(min=0)].masked_fill(tokens < 0, -1)


class CircuitParams(NamedTuple):
    """Normalised float32 log probabilities of B circuits; positions without a leaf are marginalised.

    With a vocabulary V is the number of its columns. Tokens are always ids of the target; an id outside has
    probability 0, and later positions are not conditioned on it.
    """

    leaf: Tensor  # [B, m, r, V], log-softmax over V, from position `skip` on
    root: Tensor  # [B, r], log-softmax
    inner: Tensor  # [B, F, r, r], rows [.., z, :] = log p(z' | z); F = Circuit.num_inner
    bigram: Bigram | None = None  # added to the leaves from the second position on, which are then normalised again
    skip: int = 0  # positions without a leaf before the first
    vocabulary: DraftVocabulary | None = None  # of the leaves; None: the target's

    def each(self, change: Callable[[Tensor], Tensor]) -> CircuitParams:
        """Return the parameters with `change` applied to every tensor that has a batch dimension."""
        return self._replace(leaf=change(self.leaf), root=change(self.root), inner=change(self.inner))

    def columns_of(self, tokens: Tensor) -> Tensor:
        """Return the columns of tokens; -1 for those without one."""
        return tokens if self.vocabulary is None else self.vocabulary.find(tokens)


class FilterState(NamedTuple):
    """The state of the filter between two positions."""

    weights: Tensor  # [B, r], log pi_k, normalised
    stack: tuple[Tensor, ...] = ()  # [B, r] each; used by circuits that walk a tree
    last: Tensor | None = None  # [B], the token before this position, -1: marginalised; None: the first position


class Latents(NamedTuple):
    """The tree of latents. Latent 0 has the root's weights; latent f + 1 is drawn by inner sum f."""

    parents: Sequence[int]  # [F], the latent above each of latents 1 to F: sum f goes from parents[f] to f + 1
    reads: Sequence[int]  # [n], the latent that token k is drawn by


class Circuit(ABC):
    """A structure without parameters. A subclass sets `name`; it defines `latents`, and `program` to filter over them.

    Args:
        window: n, 2 to MAX_WINDOW.
        num_components: r, 1 to `max_components`.

    Raises:
        HeadConfigError: a size is out of range.
        TypeError: the subclass has no `latents` or no `program`.
        ValueError: `latents` or `program` do not fit the window.
    """

    name: ClassVar[str]
    max_components: ClassVar[int] = MAX_COMPONENTS  # with 1 the root has no parameters

    def __init__(self, window: int, num_components: int) -> None:
        if not 2 <= window <= MAX_WINDOW:
            raise HeadConfigError(f"window={window}: a circuit spans 2 to {MAX_WINDOW} tokens; set window to that")
        if not 1 <= num_components <= self.max_components:
            allowed = f"are 1 to {self.max_components}" if self.max_components > 1 else "is exactly 1; use 'cp'"
            raise HeadConfigError(f"circuit {self.name!r} with num_components={num_components}: allowed {allowed}")
        self.window, self.num_components = window, num_components
        try:
            self._upward = _order_upward(self.latents, window)
            check_program(self.program, window, self.num_inner)
        except ValueError as error:
            raise ValueError(f"circuit {type(self).__name__}, window={window}: {error}") from None

    @property
    @abstractmethod
    def latents(self) -> Latents:
        """How the latents are connected. Sums are numbered as in the checkpoint."""

    @property
    @abstractmethod
    def program(self) -> Program:
        """The n + 1 lists of instructions: from the root to token 0, then from every token to the next."""

    @property
    def num_inner(self) -> int:
        """F, the number of r x r sum units below the root."""
        return len(self.latents.parents)

    @property
    def has_root(self) -> bool:
        """Whether the weights of the first latent are a parameter."""
        return self.max_components > 1

    def start(self, params: CircuitParams) -> FilterState:
        """Return the state at position 0."""
        return FilterState(*advance(self.program[0], params.root, (), params.root, params.inner))

    def leaf_at(self, params: CircuitParams, state: FilterState, k: int) -> Tensor:
        """Return log p(x_k = . | z, x_(k-1)) [B, r, V] at `state`; k is 0-based.

        Raises:
            ValueError: the leaf is conditioned on a token that was marginalised.
        """
        leaf = params.leaf[:, k - params.skip]
        if params.bigram is None or k == 0:
            return leaf
        _check_known(state.last)
        assert state.last is not None
        return (leaf + params.bigram.bias(k - 1, state.last)[:, None]).log_softmax(dim=-1)

    def next_log_probs(self, params: CircuitParams, state: FilterState, k: int) -> Tensor:
        """Return log q(x_k = . | observed tokens), [B, V]; arguments as in `leaf_at` (MtPC, eq. 7)."""
        return torch.logsumexp(state.weights.unsqueeze(-1) + self.leaf_at(params, state, k), dim=1)

    def observe(self, params: CircuitParams, state: FilterState, k: int, token: Tensor) -> FilterState:
        """Return the state at position k + 1 after x_k = token [B] int64 (-1: marginalised); the last state stays."""
        if k == self.window - 1:
            return state
        evidence = torch.zeros_like(state.weights)
        if k >= params.skip:
            evidence = evidence_of(self.leaf_at(params, state, k)[:, None], params.columns_of(token)[:, None])[:, 0]
        weights, stack = advance(self.program[k + 1], state.weights, state.stack, evidence, params.inner)
        return FilterState(weights, stack, token)

    def conditional_log_probs(self, params: CircuitParams, tokens: Tensor) -> Tensor:
        """Return log q(x_k | x_<k) [B, m] along tokens [B, m] int64, m <= n; 0 at -1, which marginalises a position.

        -inf at a token outside the vocabulary.

        Raises:
            ValueError: a token follows a marginalised one and its leaf is conditioned on that.
        """
        evidence = _evidence_along(params, tokens)
        weights = filter_weights(self.program, evidence, params.root, params.inner)
        log_q = torch.logsumexp(weights + evidence, dim=-1)
        return log_q.masked_fill(_is_outside(params, tokens), -torch.inf)

    def log_prob(self, params: CircuitParams, tokens: Tensor) -> Tensor:
        """Return log q(tokens) [B] by one upward pass; arguments and errors as in `conditional_log_probs`."""
        root, _ = self.multiply(params.root, params.inner, _evidence_along(params, tokens))
        return root.logsumexp(dim=-1).masked_fill(_is_outside(params, tokens).any(1), -torch.inf)

    def multiply(self, root: Tensor, inner: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of the circuit times prod_k exp(scores[k, z]), z the latent of token k, by one upward pass.

        From log-probabilities root [B, r] and inner [B, F, r, r], and scores [B, m, r], m <= n: the logits of root and
        inner. The log-sum of the former is that of the product over all latents.
        """
        parents, reads = self.latents
        values = [torch.zeros_like(root)] * (self.num_inner + 1)  # of the tokens below each latent
        for k in range(scores.shape[1]):
            values[reads[k]] = values[reads[k]] + scores[:, k]
        sums = list(inner.unbind(1))
        for f in self._upward:
            sums[f] = sums[f] + values[f + 1].unsqueeze(1)
            values[parents[f]] = values[parents[f]] + sums[f].logsumexp(dim=-1)
        return root + values[0], torch.stack(sums, dim=1) if sums else inner

    def sample(
        self, params: CircuitParams, prefix: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return exact draws [B, m] int64 from q(. | prefix), with leaves of m positions and prefix [B, j] int64."""

        def draw(log_probs: Tensor) -> Tensor:
            return torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]

        return self._decode(params, prefix, draw)

    def greedy(self, params: CircuitParams, prefix: Tensor | None = None) -> Tensor:
        """Return the argmax of each conditional in turn, [B, m], as greedy requests are drafted; see `sample`."""
        return self._decode(params, prefix, lambda log_probs: log_probs.argmax(dim=-1))

    def _decode(self, params: CircuitParams, prefix: Tensor | None, pick: Callable[[Tensor], Tensor]) -> Tensor:
        state = self.start(params)
        columns: list[Tensor] = []
        for k in range(params.skip + params.leaf.shape[1]):
            if prefix is not None and k < prefix.shape[1]:
                columns.append(prefix[:, k])
            else:
                picked = pick(self.next_log_probs(params, state, k))
                columns.append(picked if params.vocabulary is None else params.vocabulary.ids[picked])
            state = self.observe(params, state, k, columns[-1])
        return torch.stack(columns, dim=1)


def evidence_of(leaf: Tensor, tokens: Tensor) -> Tensor:
    """Return leaf [B, m, r, V] at tokens [B, m]: [B, m, r], 0 at a token of -1, which marginalises its position."""
    index = tokens.clamp(min=0)[:, :, None, None].expand(-1, -1, leaf.shape[2], 1)
    return leaf.gather(3, index)[..., 0].masked_fill((tokens < 0).unsqueeze(-1), 0.0)


def condition_on_before(
    evidence: Tensor, leaf: Tensor, biases: Tensor, tokens: Tensor, params: CircuitParams
) -> tuple[Tensor, Tensor]:
    """Return evidence [B, m, r] where leaves are conditioned on the token before, and log-normalisers [B, m - 1, r].

    The evidence given is without the token before. `biases` [B, m - 1, V] are added to the logarithms of the leaves
    [B, m - 1, r, V], probabilities p(x_k | z) from the second position on; normalisers are a matrix product. Raises
    ValueError for a token after a marginalised one (-1) in tokens [B, m].
    """
    _check_known(tokens[:, :-1].masked_fill(tokens[:, 1:] < 0, 0))
    columns = params.columns_of(tokens[:, 1:])
    known = columns >= 0
    top = biases.detach().amax(dim=-1, keepdim=True)  # [B, m - 1, 1]
    norms = (leaf @ (biases - top).exp().unsqueeze(-1))[..., 0].clamp(min=TINY).log() + top
    added = biases.gather(2, columns.clamp(min=0)[..., None]) - norms
    later = evidence[:, 1:] + added.masked_fill(~known[..., None], 0.0)
    return torch.cat([evidence[:, :1], later], dim=1), norms


def _evidence_along(params: CircuitParams, tokens: Tensor) -> Tensor:
    """Return log p(x_k | z, x_(k-1)) [B, m, r] along tokens [B, m]; 0 where x_k is -1 or has no column."""
    evidence, leaf = evidence_with_skipped(params, tokens)
    if params.bigram is None or tokens.shape[1] == 1:
        return evidence
    biases = params.bigram.biases(tokens[:, :-1])
    return condition_on_before(evidence, leaf[:, 1 - params.skip :].exp(), biases, tokens, params)[0]


def evidence_with_skipped(params: CircuitParams, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p(x_k | z) [B, m, r] without a bigram along tokens [B, m], and the leaves [B, m - skip, r, V]."""
    leaf = params.leaf[:, : tokens.shape[1] - params.skip]
    # One gather for all positions: one per position costs a full-size gradient of the leaves each.
    return F.pad(evidence_of(leaf, params.columns_of(tokens[:, params.skip :])), (0, 0, params.skip, 0)), leaf


def _is_outside(params: CircuitParams, tokens: Tensor) -> Tensor:
    """Return where tokens [B, m] have a leaf without a column for them."""
    is_outside = (params.columns_of(tokens) < 0) & (tokens >= 0)
    is_outside[:, : params.skip] = False
    return is_outside


def _check_known(before: Tensor | None) -> None:
    if before is None or bool((before < 0).any()):
        raise ValueError(
            "a token of -1 before a position whose leaf is conditioned on the token before it: that marginal is not a "
            "sum over latents; pass the token, or a head with token_rank=0"
        )


def _order_upward(latents: Latents, window: int) -> list[int]:
    """The sums in the order of an upward pass; raises ValueError unless they are a tree of latents over the window."""
    if not isinstance(latents, Latents):
        raise ValueError("latents must be Latents(parents, reads)")
    parents, reads = latents
    known = range(len(parents) + 1)
    if len(reads) != window or any(latent not in known for latent in (*parents, *reads)):
        raise ValueError(
            f"reads of latents must be {window} numbers from 0 to {len(parents)}, parents such numbers too"
        )
    depths = []
    for latent in known[1:]:
        depth = 0
        while latent and depth <= len(parents):
            latent, depth = parents[latent - 1], depth + 1
        if latent:
            raise ValueError("parents of latents form a cycle; each must lead up to latent 0")
        depths.append(depth)
    return sorted(range(len(parents)), key=depths.__getitem__, reverse=True)
