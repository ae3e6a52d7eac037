"""A head: a trunk, leaves and a circuit.

    states = trunk(h, x_1)
    leaf[k, z, :] = log_softmax(leaves(states) of position k, component z)
    root = log_softmax(R s)        inner[f, z, :] = log_softmax(W[f, z] s + b[f, z]),      s: the first state

Without a trunk that has seen x_1, the circuit is conditioned on x_1 by its leaf; with one the leaves start at x_2. With
a draft vocabulary a leaf has columns for its ids only: q is 0 for all others. Training calls the head, serving calls
`draft_params`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mtpc.circuits import get_circuit
from vllm_mtpc.circuits.base import Circuit, CircuitParams, DraftVocabulary
from vllm_mtpc.heads.leaves import LEAVES
from vllm_mtpc.heads.leaves.base import INIT_STD, Leaves
from vllm_mtpc.heads.trunk import TRUNKS
from vllm_mtpc.heads.trunk.base import Trunk
from vllm_mtpc.kernels.leaf import Bigram, LowRank, evidence_of

STAY_PROBABILITY = 0.95  # of keeping the latent at initialisation: nearly a CP, and the softmax is not saturated


class DraftParams(NamedTuple):
    """The parameters of a batch of circuits for drafting after x_1; logits are not normalised."""

    evidence: Tensor | None  # [B, r] float32, log p(x_1 | z), 0 if it is the same for all z; None: `leaf` has x_1
    leaf: Tensor  # [B, K, r, columns], logits of x_2 .. x_(1+K)
    root: Tensor  # [B, r], logits
    inner: Tensor  # [B, F, r, r], logits
    first: Tensor  # [B] int64, x_1
    bigram: Bigram | None = None  # of K positions
    low: LowRank | None = None  # differences of the components from `leaf`, which is then [B, K, 1, columns]


class Head(nn.Module):
    """Hidden states of B windows, and x_1 -> CircuitParams.

    Parameters: `trunk.*`, `leaves.*`; root_weight [r, D] where the circuit has a root; inner_weight [F, r, r, D] and
    inner_bias [F, r, r], leaves to root (HMM: in position order), where it has inner sums. With a draft vocabulary the
    buffers d2t [columns] int64, id minus column of each, and t2d [V] bool, vLLM's and speculators' names.

    Circuit (n tokens, r components), trunk and leaves have the same sizes; `vocab_size` is V, `hidden_size` D.
    """

    component_dims: ClassVar[dict[str, tuple[int, ...]]] = {  # dimensions of a parameter that run over components
        "root_weight": (0,),
        "inner_weight": (1, 2),
        "inner_bias": (1, 2),
    }

    def __init__(self, circuit: Circuit, trunk: Trunk, leaves: Leaves, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.circuit, self.trunk, self.leaves = circuit, trunk, leaves
        self.vocab_size, self.hidden_size, self.columns = vocab_size, hidden_size, leaves.columns  # tokens of a leaf
        r, inner = circuit.num_components, circuit.num_inner
        self.root_weight = nn.Parameter(torch.empty(r, hidden_size)) if circuit.has_root else None
        self.inner_weight = nn.Parameter(torch.empty(inner, r, r, hidden_size)) if inner else None
        self.inner_bias = nn.Parameter(torch.empty(inner, r, r)) if inner else None
        self._vocabulary: DraftVocabulary | None = None
        if leaves.columns < vocab_size:
            self.register_buffer("d2t", torch.zeros(leaves.columns, dtype=torch.int64))
            self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))
        # on meta, even filling a tensor imports seconds worth of torch
        if not any(value.is_meta for value in self.parameters()):
            self.reset_parameters()

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """The ids of the columns; None: they are the target's vocabulary."""
        if self.columns == self.vocab_size:
            return None
        if self._vocabulary is None or self._vocabulary.ids.device != self.d2t.device:
            ids = self.d2t + torch.arange(self.columns, device=self.d2t.device)
            self._vocabulary = DraftVocabulary.of(ids, self.vocab_size)
        return self._vocabulary

    def set_vocabulary(self, ids: Tensor) -> None:
        """Set the ids [columns] of the leaves, rising."""
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d.copy_(torch.zeros(self.vocab_size, dtype=torch.bool).index_fill(0, ids, True))
        self.forget_vocabulary()

    def forget_vocabulary(self) -> None:
        """Read the ids again: d2t has changed."""
        self._vocabulary = None

    def sum_logits(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the root [B, r] and of the inner sums [B, F, r, r] for states [B, D], float32."""
        weights = (self.root_weight, self.inner_weight)
        rows = (None if weight is None else weight.reshape(-1, self.hidden_size) for weight in weights)
        return self._to_sums(*(states[:, :0] if weight is None else F.linear(states, weight) for weight in rows))

    def _to_sums(self, root: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of `sum_logits` from products with root_weight and inner_weight; without one no columns."""
        batch, r = len(root), self.circuit.num_components
        root = root.float() if root.shape[1] else root.new_zeros(batch, r, dtype=torch.float32)
        inner = inner.float().view(batch, self.circuit.num_inner, r, r)
        return root, inner if self.inner_bias is None else inner + self.inner_bias.float()

    @property
    def hidden_dtype(self) -> torch.dtype:
        """The dtype that hidden states are converted to before they are multiplied."""
        weights = (value.dtype for value in self.parameters())  # a converted drafter's head has none
        return getattr(self.leaves, "packed_dtype", None) or next(weights, torch.get_default_dtype())

    def draft_params(self, hidden: Tensor, first: Tensor, num_drafts: int, in_blocks: bool = False) -> DraftParams:
        """Return the inputs of `kernels.draft` for K drafts after x_1 = first [B] int64.

        The trunk reads hidden [B, D] or [B, Q, D] of any float dtype. The kernel's path of blocks (`in_blocks`) takes
        `low` and leaves with x_1.
        """
        state, states = self.trunk(hidden.to(self.hidden_dtype), first)
        if getattr(self.leaves, "packed_dtype", None):
            evidence, leaf, *products = self.leaves.draft_packed(state, self._column(first), num_drafts)
            sums, low = self._to_sums(*products), None
        else:
            sums, (evidence, leaf, low) = self.sum_logits(state), self._draft_leaves(states, first, num_drafts)
            if not in_blocks or (evidence is None and self.vocabulary):
                leaf, low = leaf if low is None else low.leaves(leaf), None
                if evidence is None:
                    evidence, leaf = evidence_of(leaf[:, 0], self._column(first)), leaf[:, 1:]
        if evidence is not None and self.vocabulary and not self.leaves.skip:
            evidence = evidence.masked_fill((self.vocabulary.columns[first] < 0)[:, None], 0.0)
        return DraftParams(evidence, leaf, *sums, first, self.leaves.bigram(num_drafts), low)

    def _draft_leaves(
        self, states: Tensor, first: Tensor, num_drafts: int
    ) -> tuple[Tensor | None, Tensor, LowRank | None]:
        """Return evidence, leaf and low of `DraftParams` with the fewest bytes."""
        if self.leaves.skip or (self.circuit.num_components == 1 and getattr(self.leaves, "shard", None) is None):
            evidence = torch.zeros(len(states), self.circuit.num_components, device=states.device)  # it cancels
            return evidence, *self.leaves.base(states, 1, num_drafts + 1)
        return self.leaves.draft(states, self._column(first), num_drafts + 1)

    def _column(self, tokens: Tensor) -> Tensor:
        """Return the columns [B] of ids [B]; 0 for those outside."""
        return tokens if self.vocabulary is None else self.vocabulary.columns[tokens].clamp(min=0)

    def pack(self, num_positions: int) -> None:
        """Lay out the weights of the first `num_positions` positions for one product, where the leaves can."""
        sums = self.root_weight, self.inner_weight
        can_pack = hasattr(self.leaves, "pack") and not self.trunk.is_per_position
        if can_pack and self.leaves.pack(num_positions, sums):
            self.root_weight = self.inner_weight = None

    def forward(self, hidden: Tensor, first: Tensor | None = None, num_positions: int | None = None) -> CircuitParams:
        """Return CircuitParams of the first `num_positions` positions, x_1 included (None: all).

        The trunk reads hidden [B, D] or [B, Q, D]; one that reads the embedding of x_1 needs `first` [B] int64.
        """
        state, states = self.trunk(hidden, first)
        leaf = self.leaves(states, self.leaves.skip, num_positions or self.circuit.window).float()
        root, inner = (logits.log_softmax(-1) for logits in self.sum_logits(state))
        return CircuitParams(leaf.log_softmax(-1), root, inner, self.leaves.bigram(), self.leaves.skip, self.vocabulary)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise: small random sum weights, and inner sums that mostly keep the latent."""
        self.trunk.reset_parameters()
        if self.trunk.predicts_drafts and self.leaves.needs_lm_head:
            self.leaves.reset_parameters(at_states=True)
        else:
            self.leaves.reset_parameters()
        for weight in (self.root_weight, self.inner_weight):
            if weight is not None:
                weight.normal_().mul_(INIT_STD)
        if self.inner_bias is not None:
            self.inner_bias.copy_(stay_bias(self.circuit.num_components, STAY_PROBABILITY))


def stay_bias(r: int, probability: float) -> Tensor:
    """Return logits [r, r] of a sum that keeps its latent with `probability`; the rest is spread evenly."""
    if r == 1:
        return torch.zeros(1, 1)
    return torch.eye(r) * math.log(probability * (r - 1) / (1 - probability))


def build_head(config: Any) -> Head:
    """Return an untrained head for a HeadConfig, on the current default device and dtype."""
    circuit = get_circuit(config.circuit.kind, config.window, config.circuit.num_components)
    kinds = TRUNKS.find(config.trunk.kind), LEAVES.find(config.leaves.kind)
    trunk = kinds[0](config.trunk, config.window, config.hidden_size)
    columns = config.draft_vocab_size or config.vocab_size
    leaves = kinds[1](config.leaves, circuit, int(trunk.sees_first), columns, config.vocab_size, config.hidden_size)
    return Head(circuit, trunk, leaves, config.vocab_size, config.hidden_size)
