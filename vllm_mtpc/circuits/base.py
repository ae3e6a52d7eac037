"""The one contract every circuit fulfils, and everything that follows from it.

A circuit is a distribution over a window of n tokens x_0 .. x_{n-1} (0-based here) with r latent
states. With leaf[k, z, v] = log p(x_k = v | z, h) every circuit is a filter over log weights pi_k:

    q(x_k = v | x_<k, h) = sum_z exp(pi_k[z] + leaf[k, z, v])

A leaf may look at the token before it (`Bigram`): along given tokens it is a number per latent all the same, so the
filter holds; what is lost is the marginal over a token in the middle.

A circuit says how its latents hang together (`latents`) and which instructions move its weights from token to token
(`program`; run here in PyTorch, by the kernels on a GPU). Conditionals, joint log-probability, sampling, greedy and
max-product decoding are written once, here. All arithmetic is float32 log space with the maximum subtracted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.kernels.bigram import Bigram
from vllm_mtpc.kernels.filter import Program, check_program, filter_weights, naive

# Far beyond what can be trained or served; a damaged config must not ask for a tree of 10**12 regions.
MAX_WINDOW = 256
MAX_COMPONENTS = 4096
TINY = torch.finfo(torch.float32).tiny

Reduce = Callable[[Tensor, int], Tensor]  # logsumexp for the joint, max for max-product


class CircuitParams(NamedTuple):
    """Normalised parameters of a batch of circuits; float32 log probabilities.

    `leaf` may hold only the first m <= n positions: later ones are then marginalised.
    """

    leaf: Tensor  # [B, m, r, V], log-softmax over V
    root: Tensor  # [B, r], log-softmax
    inner: Tensor  # [B, F, r, r], rows [.., z, :] = log p(z' | z); F = Circuit.num_inner
    bigram: Bigram | None = None  # added to the leaves from the second position on, which are then normalised again

    def each(self, change: Callable[[Tensor], Tensor]) -> CircuitParams:
        """The same with what is of each circuit changed: repeated, or only some of them taken."""
        return CircuitParams(change(self.leaf), change(self.root), change(self.inner), self.bigram)


class FilterState(NamedTuple):
    """What a circuit remembers between two positions."""

    weights: Tensor  # [B, r], log pi_k, normalised
    stack: tuple[Tensor, ...] = ()  # [B, r] each; used by circuits that walk a tree
    last: Tensor | None = None  # [B], the token before this position, -1: marginalised; None: there is none


class Latents(NamedTuple):
    """The tree of latents. Latent 0 has the root's weights; latent f + 1 is drawn by inner sum f."""

    parents: Sequence[int]  # [F], the latent above each of latents 1 to F: sum f goes from parents[f] to f + 1
    reads: Sequence[int]  # [n], the latent that token k is drawn by


class Circuit(ABC):
    """A structure over `window` tokens with `num_components` latent states; holds no parameters.

    A subclass has a `name`, `latents` and `program`. Without a name, TypeError where the class is defined; without the
    others, or where they do not fit the window, TypeError or ValueError where it is constructed.
    """

    name: ClassVar[str]
    max_components: ClassVar[int] = MAX_COMPONENTS  # 1: there is nothing to choose, and the root has no parameters

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if not isinstance(getattr(cls, "name", None), str):
            raise TypeError(f"circuit {cls.__name__} has no name; write name = ... into the class, as in CIRCUITS")

    def __init__(self, window: int, num_components: int) -> None:
        if not 2 <= window <= MAX_WINDOW:
            raise HeadConfigError(f"window={window}: a circuit spans 2 to {MAX_WINDOW} tokens; set window to that")
        if not 1 <= num_components <= self.max_components:
            allowed = f"are 1 to {self.max_components}" if self.max_components > 1 else "is exactly 1; use 'cp'"
            raise HeadConfigError(f"circuit {self.name!r} with num_components={num_components}: allowed {allowed}")
        self.window = window
        self.num_components = num_components
        try:
            self._upward = _leaves_first(self.latents, window)
            check_program(self.program, window, self.num_inner)
        except ValueError as error:
            raise ValueError(f"circuit {type(self).__name__}, window={window}: {error}") from None

    @property
    @abstractmethod
    def latents(self) -> Latents:
        """How the latents hang together. Sums are numbered as in the checkpoint."""

    @property
    @abstractmethod
    def program(self) -> Program:
        """How the weights get from the root to token 0, then from every token to the next: n + 1 lists."""

    @property
    def num_inner(self) -> int:
        """F, the number of r x r sum units below the root."""
        return len(self.latents.parents)

    @property
    def has_root(self) -> bool:
        """Whether the weights of the first latent are a parameter."""
        return self.max_components > 1

    def joint(self, params: CircuitParams, evidence: Tensor, reduce: Reduce) -> Tensor:
        """Root value [B] of the upward pass over evidence[B, n, r]; `reduce` combines latent states."""
        parents, reads = self.latents
        values = [torch.zeros_like(evidence[:, 0])] * (self.num_inner + 1)  # of what is below each latent
        for k, latent in enumerate(reads):
            values[latent] = values[latent] + evidence[:, k]
        for f in self._upward:
            message = reduce(params.inner[:, f] + values[f + 1].unsqueeze(1), -1)
            values[parents[f]] = values[parents[f]] + message
        return reduce(params.root + values[0], -1)

    def start(self, params: CircuitParams) -> FilterState:
        """State at position 0."""
        return FilterState(*naive.advance(self.program[0], params.root, (), params.root, params.inner))

    def advance(self, params: CircuitParams, state: FilterState, k: int, evidence: Tensor) -> FilterState:
        """State at position k + 1, given evidence[B, r] = leaf[:, k, :, x_k] (0: x_k marginalised); k < n - 1."""
        return FilterState(*naive.advance(self.program[k + 1], state.weights, state.stack, evidence, params.inner))

    # ---- what follows from the contract -------------------------------------------------------

    def leaf_at(self, params: CircuitParams, state: FilterState, k: int) -> Tensor:
        """log p(x_k = . | z, x_(k-1)), [B, r, V]. Raises ValueError where the leaf needs a token that is not known."""
        if params.bigram is None or k == 0:
            return params.leaf[:, k]
        _check_known(state.last)
        return (params.leaf[:, k] + params.bigram.bias(k - 1, state.last)[:, None]).log_softmax(dim=-1)

    def next_log_probs(self, params: CircuitParams, state: FilterState, k: int) -> Tensor:
        """log q(x_k = . | observed so far), [B, V]."""
        return torch.logsumexp(state.weights.unsqueeze(-1) + self.leaf_at(params, state, k), dim=1)

    def observe(self, params: CircuitParams, state: FilterState, k: int, token: Tensor) -> FilterState:
        """State after x_k = token[B] was seen (-1: marginalised); the last position leaves it unchanged."""
        if k == self.window - 1:
            return state
        seen = evidence_of(self.leaf_at(params, state, k)[:, None], token[:, None])[:, 0]
        return self.advance(params, state, k, seen)._replace(last=token)

    def conditional_log_probs(self, params: CircuitParams, tokens: Tensor) -> Tensor:
        """log q(x_k | x_<k) along tokens[B, m], m <= n, -> [B, m]; -1 marginalises a position (its term is 0).

        Raises ValueError for a token behind a marginalised one where leaves look at the token before (as `log_prob`).
        """
        evidence = evidence_along(params, tokens)
        weights = filter_weights(self.program, evidence, params.root, params.inner)
        return torch.logsumexp(weights + evidence, dim=-1)

    def log_prob(self, params: CircuitParams, tokens: Tensor) -> Tensor:
        """log q(tokens) [B] by one upward pass over tokens[B, m], m <= n; -1 and the tail are marginalised."""
        return self.joint(params, self._with_tail(evidence_along(params, tokens)), torch.logsumexp)

    def sample(
        self, params: CircuitParams, prefix: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Exact draws [B, m] from q(. | prefix[B, j]); the prefix is returned as the first j columns."""

        def draw(log_probs: Tensor) -> Tensor:
            return torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]

        return self._decode(params, prefix, draw)

    def greedy(self, params: CircuitParams, prefix: Tensor | None = None) -> Tensor:
        """Conditional argmax, position by position, [B, m]: what a greedy request is drafted with."""
        return self._decode(params, prefix, lambda log_probs: log_probs.argmax(dim=-1))

    def mpe(self, params: CircuitParams, prefix: Tensor | None = None) -> Tensor:
        """Tokens [B, m] of the most probable (latents, tokens) pair given the prefix (max-product).

        The latent chosen at each leaf is read off as the gradient of the max-product value with
        respect to its evidence: one-hot, by the chain rule through `max` (Darwiche's differential
        reading of a circuit), so that no circuit needs a backtracking pass of its own. Raises ValueError where leaves
        look at the token before them: the best token of a latent is then not known by itself.
        """
        if params.bigram is not None:
            raise ValueError("mpe: leaves look at the token before them; use greedy or sample, or token_rank=0")
        with torch.inference_mode(False), torch.enable_grad():
            leaf = params.leaf.detach().clone()
            frozen = CircuitParams(leaf, params.root.detach().clone(), params.inner.detach().clone())
            evidence, tokens = leaf.max(dim=-1)  # both [B, m, r]
            if prefix is not None and prefix.shape[1]:
                seen = prefix.shape[1]
                evidence[:, :seen] = evidence_of(leaf[:, :seen], prefix)
                tokens[:, :seen] = prefix.unsqueeze(-1)
            evidence.requires_grad_(True)
            self.joint(frozen, self._with_tail(evidence), _max).sum().backward()
            assert evidence.grad is not None
            chosen = evidence.grad.argmax(dim=-1, keepdim=True)  # [B, m, 1]
        return tokens.gather(-1, chosen)[..., 0]

    def _decode(self, params: CircuitParams, prefix: Tensor | None, pick: Callable[[Tensor], Tensor]) -> Tensor:
        length = params.leaf.shape[1]
        state = self.start(params)
        columns: list[Tensor] = []
        for k in range(length):
            if prefix is not None and k < prefix.shape[1]:
                columns.append(prefix[:, k])
            else:
                columns.append(pick(self.next_log_probs(params, state, k)))
            state = self.observe(params, state, k, columns[-1])
        return torch.stack(columns, dim=1)

    def _with_tail(self, evidence: Tensor) -> Tensor:
        """evidence[B, m, r] made [B, n, r]: evidence 0 integrates the missing tokens to 1."""
        return torch.nn.functional.pad(evidence, (0, 0, 0, self.window - evidence.shape[1]))


def evidence_of(leaf: Tensor, tokens: Tensor) -> Tensor:
    """leaf[B, m, r, V] at tokens[B, m] -> [B, m, r]; a token of -1 gives 0, which marginalises the position."""
    index = tokens.clamp(min=0)[:, :, None, None].expand(-1, -1, leaf.shape[2], 1)
    return leaf.gather(3, index)[..., 0].masked_fill((tokens < 0).unsqueeze(-1), 0.0)


def evidence_along(params: CircuitParams, tokens: Tensor) -> Tensor:
    """log p(x_k | z, x_(k-1)) [B, m, r] along tokens[B, m]; 0 where x_k is -1.

    One gather for all positions: one per position costs a full-size gradient of the leaves each.
    """
    evidence = evidence_of(params.leaf[:, : tokens.shape[1]], tokens)
    if params.bigram is None or tokens.shape[1] == 1:
        return evidence
    biases = params.bigram.biases(tokens[:, :-1])
    return condition_on_before(evidence, params.leaf[:, 1 : tokens.shape[1]].exp(), biases, tokens)[0]


def condition_on_before(evidence: Tensor, leaf: Tensor, biases: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Evidence [B, m, r] along tokens[B, m] when leaves look at the token before, and log-normalisers [B, m - 1, r].

    evidence: without that; leaf [B, m - 1, r, V]: probabilities p(x_k | z) from the second position on; biases
    [B, m - 1, V]: what the token before adds to their logarithms. The normaliser is a product: sum_v p(v) exp(bias(v)).
    """
    known = tokens[:, 1:] >= 0
    _check_known(tokens[:, :-1].masked_fill(~known, 0))
    top = biases.detach().amax(dim=-1, keepdim=True)  # [B, m - 1, 1]
    norms = (leaf @ (biases - top).exp().unsqueeze(-1))[..., 0].clamp(min=TINY).log() + top
    added = biases.gather(2, tokens[:, 1:].clamp(min=0)[..., None]) - norms
    later = evidence[:, 1:] + added.masked_fill(~known[..., None], 0.0)
    return torch.cat([evidence[:, :1], later], dim=1), norms


def _check_known(before: Tensor | None) -> None:
    if before is None or bool((before < 0).any()):
        raise ValueError(
            "a token of -1 before a position whose leaf looks at the token before it: that marginal is not a sum over "
            "latents; give the token, or a head with token_rank=0"
        )


def _leaves_first(latents: Latents, window: int) -> list[int]:
    """The sums, those below another one before it. Raises ValueError for what is no tree of latents over the window."""
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
            raise ValueError("parents of latents go in a circle; each must lead up to latent 0")
        depths.append(depth)
    return sorted(range(len(parents)), key=depths.__getitem__, reverse=True)


def _max(values: Tensor, dim: int) -> Tensor:
    return values.max(dim=dim).values  # one index wins, also among ties; amax would split the gradient
