"""The contract of a head, and the sum parameters, which all heads have alike.

A head maps the target's last hidden state h to the parameters of a circuit (MtPC paper, section 4):

    leaf[k, z, :] = log_softmax(leaf_logits of position k, component z)       defined by the head
    root = log_softmax(R h)        inner[f, z, :] = log_softmax(W[f, z] h + b[f, z])       the same in every head

With `token_rank` a leaf is also conditioned on the token before it (`kernels/bigram.py`). Training calls the head,
serving calls `draft_params`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mtpc.circuits import Circuit, CircuitParams
from vllm_mtpc.kernels.bigram import Bigram
from vllm_mtpc.kernels.leaf import evidence_of
from vllm_mtpc.kernels.low_rank import LowRank
from vllm_mtpc.kernels.shard import Shard

STAY_PROBABILITY = 0.95  # of keeping the latent at initialisation: nearly a CP, and the softmax is not saturated
INIT_STD = 0.01
TOKEN_STD = 0.1  # of token_source: rows must differ for token_target, which starts at 0, to learn anything


class DraftParams(NamedTuple):
    """The parameters of a batch of circuits for drafting after x_1; logits are not normalised."""

    evidence: Tensor | None  # [B, r] float32, log p(x_1 | z), 0 with one component; None: `leaf` has x_1 before x_2
    leaf: Tensor  # [B, K, r, V], logits of x_2 .. x_(1+K); of a head with a `leaf_shard` [B, K, r, rows]
    root: Tensor  # [B, r], logits
    inner: Tensor  # [B, F, r, r], logits
    first: Tensor  # [B] int64, x_1
    bigram: Bigram | None = None  # of K positions, over the whole vocabulary also with a shard
    low: LowRank | None = None  # differences of the components from `leaf`, which is then [B, K, 1, V]


class Head(nn.Module, ABC):
    """Hidden states [B, D] -> CircuitParams of a batch of B circuits.

    Parameters of every head: root_weight [r, D] where the circuit has a root; inner_weight [F, r, r, D] and inner_bias
    [F, r, r], leaves to root (HMM: in position order), where it has inner sums; token_source [V, R] and token_target
    [n - 1, R, V], positions 2 to n, where R = token_rank is not 0. Hidden states have the dtype of the weights.

    Args:
        circuit: the structure; of n tokens and r components.
        vocab_size: V.
        hidden_size: D.
        token_rank: R, rank of the bigram; 0: none.
        options: of this kind of head, passed to `add_leaves`.
    """

    needs_lm_head: ClassVar[bool] = False  # True: a `BorrowedLmHead`, which needs bind_lm_head before it is used
    # Dimensions of a parameter that run over components, along which a source head is repeated (`init_from_head`).
    component_dims: ClassVar[dict[str, tuple[int, ...]]] = {
        "root_weight": (0,),
        "inner_weight": (1, 2),
        "inner_bias": (1, 2),
    }
    noise_in: ClassVar[str]  # the parameter of the leaves whose noise makes equal components differ
    component_rank: int = 0  # R_c of components by low-rank differences; 0: each component has its own leaves
    leaf_shard: Shard | None = None  # the tokens that `draft_params` has logits of; None: the vocabulary

    def __init__(
        self, circuit: Circuit, vocab_size: int, hidden_size: int, token_rank: int = 0, **options: int
    ) -> None:
        super().__init__()
        self.circuit, self.vocab_size, self.hidden_size = circuit, vocab_size, hidden_size
        self.token_rank, self.options = token_rank, options
        self.add_leaves(**options)
        self.token_source = nn.Parameter(torch.empty(vocab_size, token_rank)) if token_rank else None
        shape = circuit.window - 1, token_rank, vocab_size
        self.token_target = nn.Parameter(torch.empty(shape)) if token_rank else None
        r, inner = circuit.num_components, circuit.num_inner
        self.root_weight = nn.Parameter(torch.empty(r, hidden_size)) if circuit.has_root else None
        self.inner_weight = nn.Parameter(torch.empty(inner, r, r, hidden_size)) if inner else None
        self.inner_bias = nn.Parameter(torch.empty(inner, r, r)) if inner else None
        if not next(self.parameters()).is_meta:  # on meta, even filling a tensor imports seconds worth of torch
            self.reset_parameters()

    @abstractmethod
    def add_leaves(self, *args: Any, **options: Any) -> None:
        """Create the parameters of the leaves, uninitialised, in position order, for the options of the head."""

    @abstractmethod
    def reset_leaves(self) -> None:
        """Initialise the parameters of the leaves from torch's own generator."""

    @abstractmethod
    def unembed(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Return the unnormalised leaves [B, k, r, V] of positions start .. stop - 1 for hidden [B, D]."""

    def sum_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the root [B, r] and of the inner sums [B, F, r, r] for hidden [B, D], float32."""
        batch, r = hidden.shape[0], self.circuit.num_components
        if self.root_weight is None:
            root = hidden.new_zeros(batch, r, dtype=torch.float32)
        else:
            root = F.linear(hidden, self.root_weight).float()
        if self.inner_weight is None or self.inner_bias is None:
            return root, root.new_zeros(batch, 0, r, r)
        inner = F.linear(hidden, self.inner_weight.reshape(-1, self.hidden_size)).float()
        return root, inner.view(batch, -1, r, r) + self.inner_bias.float()

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype that hidden states are converted to before they are multiplied."""
        return next(self.parameters()).dtype

    def draft_params(self, hidden: Tensor, first: Tensor, num_drafts: int, in_blocks: bool = False) -> DraftParams:
        """Return the inputs of `kernels.draft` for K drafts after x_1.

        Args:
            hidden: [B, D] of any float dtype.
            first: [B] int64, x_1.
            num_drafts: K.
            in_blocks: for the kernel's path of blocks, which takes `low` and leaves with x_1.
        """
        hidden = hidden.to(self.hidden_dtype)
        evidence, leaf, low = self.draft_leaves(hidden, first, num_drafts)
        if not in_blocks:
            leaf, low = leaf if low is None else low.leaves(leaf), None
            if evidence is None:
                evidence, leaf = evidence_of(leaf[:, 0], first), leaf[:, 1:]
        return DraftParams(evidence, leaf, *self.sum_logits(hidden), first, self.bigram(num_drafts), low)

    def undivided(self) -> Head:
        """Return the head, or with a `leaf_shard` one of the same parameters whose ranks gather the logits."""
        return self

    def bigram(self, num_positions: int | None = None) -> Bigram | None:
        """Return the bigram of `num_positions` positions from the second on (None: all); None with token_rank 0."""
        if self.token_source is None or self.token_target is None:
            return None
        return Bigram(self.token_source, self.token_target[:num_positions])

    def draft_leaves(
        self, hidden: Tensor, first: Tensor, num_drafts: int
    ) -> tuple[Tensor | None, Tensor, LowRank | None]:
        """Return evidence, leaf and low of `DraftParams` with the fewest bytes."""
        if self.circuit.num_components == 1:  # its evidence cancels
            evidence = hidden.new_zeros(len(hidden), 1, dtype=torch.float32)
            return evidence, self.unembed(hidden, 1, num_drafts + 1), None
        logits = self.unembed(hidden, 0, num_drafts + 1)
        return evidence_of(logits[:, 0], first), logits[:, 1:], None

    def forward(self, hidden: Tensor, num_positions: int | None = None) -> CircuitParams:
        """Return CircuitParams for hidden [B, D], of the first `num_positions` leaves (None: all)."""
        leaf = self.unembed(hidden, 0, num_positions or self.circuit.window).float()
        root, inner = self.sum_logits(hidden)
        return CircuitParams(leaf.log_softmax(-1), root.log_softmax(-1), inner.log_softmax(-1), self.bigram())

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise: small random sum weights, inner sums that mostly keep the latent, a bigram that adds 0."""
        self.reset_leaves()
        if self.token_source is not None and self.token_target is not None:
            self.token_source.normal_().mul_(TOKEN_STD)
            self.token_target.zero_()
        for weight in (self.root_weight, self.inner_weight):
            if weight is not None:
                weight.normal_().mul_(INIT_STD)
        if self.inner_bias is not None:
            self.inner_bias.copy_(stay_bias(self.circuit.num_components, STAY_PROBABILITY))


def rank_in_group(group: Tensor) -> Tensor:
    """Return how many entries before each of group [B] int64 are equal to it."""
    order, counts, rank = group.argsort(stable=True), torch.bincount(group), torch.empty_like(group)
    rank[order] = torch.arange(len(group), device=group.device) - (counts.cumsum(0) - counts)[group[order]]
    return rank


def stay_bias(r: int, probability: float) -> Tensor:
    """Return logits [r, r] of a sum that keeps its latent with `probability`; the rest is spread evenly."""
    if r == 1:
        return torch.zeros(1, 1)
    return torch.eye(r) * math.log(probability * (r - 1) / (1 - probability))
