"""Linear head: one trained unembedding U per position and component (MtPC paper, section 4).

    leaf[k, z, :] = log_softmax(U[k, z] h)

A server may divide the unembeddings over ranks (`shard_leaves`) and then lay out all weights for the processor
(`pack`). Such a head can only draft.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from vllm_mtpc.heads.base import INIT_STD, DraftParams, Head
from vllm_mtpc.kernels import leaf
from vllm_mtpc.kernels.low_rank import LowRank
from vllm_mtpc.kernels.shard import Shard

# Minimum bytes of unembeddings that are divided over the ranks: reading them must cost more than the gather.
# CPU: 22 GB/s against 0.24 to 0.6 ms of a gather (gloo, two ranks). GPU, not measured: 20 us at 3.3 TB/s.
SHARD_BYTES, SHARD_BYTES_GPU = {"cpu": 16 << 20}, 64 << 20


class LinearHead(Head):
    """Linear unembeddings. Leaf parameters: leaf_weight [n, r, V, D] in position order."""

    component_dims: ClassVar = {**Head.component_dims, "leaf_weight": (1,)}
    noise_in = "leaf_weight"

    def add_leaves(self) -> None:
        n, r = self.circuit.window, self.circuit.num_components
        self.leaf_weight = nn.Parameter(torch.empty(n, r, self.vocab_size, self.hidden_size))
        self.shard: Shard | None = None
        self._packed: Tensor | None = None  # replaces all weights
        self._hidden_dtype: torch.dtype | None = None  # of the packed weights

    def reset_leaves(self) -> None:
        self.leaf_weight.normal_().mul_(INIT_STD)

    @property
    def hidden_dtype(self) -> torch.dtype:
        return self._hidden_dtype or super().hidden_dtype

    def unembed(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        return leaf.logits(hidden, self.leaf_weight[start:stop])

    def draft_params(self, hidden: Tensor, first: Tensor, num_drafts: int, in_blocks: bool = False) -> DraftParams:
        """As in Head; from one product of all packed weights after `pack`."""
        if self._packed is None:
            return super().draft_params(hidden, first, num_drafts)
        product = torch.ops.mkldnn._linear_pointwise(hidden.to(self.hidden_dtype), self._packed, None, "none", [], "")
        batch, r = len(hidden), self.circuit.num_components
        leaves, root, inner = product.split(self._parts, dim=1)
        logits = leaves.view(batch, -1, r, leaves.shape[1] // (r * self._num_positions))
        evidence, drafted = self._join_ranks(logits[:, 0], logits[:, 1 : num_drafts + 1], first)
        inner = inner.float().view(batch, -1, r, r)
        inner = inner if self.inner_bias is None else inner + self.inner_bias.float()
        root = root.float() if root.shape[1] else product.new_zeros(batch, r, dtype=torch.float32)
        return DraftParams(evidence, drafted, root, inner, first, self.bigram(num_drafts))

    def draft_leaves(
        self, hidden: Tensor, first: Tensor, num_drafts: int
    ) -> tuple[Tensor | None, Tensor, LowRank | None]:
        if self.circuit.num_components == 1 and self.shard is None:
            return super().draft_leaves(hidden, first, num_drafts)
        if hidden.is_cuda:
            return *self._draft_apart(hidden, first, num_drafts), None
        logits = self.unembed(hidden, 0, num_drafts + 1)
        return *self._join_ranks(logits[:, 0], logits[:, 1:], first), None

    def _draft_apart(self, hidden: Tensor, first: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
        """Return evidence and leaf by two products, which do not store the logits of x_1."""
        first = first if self.shard is None else first - self.shard.start
        terms = leaf.terms(hidden, self.leaf_weight[0], first)
        logits = self.unembed(hidden, 1, num_drafts + 1)
        return (terms[:, 1] - terms[:, 0], logits) if self.shard is None else self.shard.join(terms, logits)

    def _join_ranks(self, at_first: Tensor, drafted: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Return evidence and leaf from the logits [B, r, V] of x_1 and [B, K, r, V] of the drafts, of this rank."""
        if self.shard is None:
            evidence = leaf.evidence_of(at_first, first)
            return evidence if evidence.shape[1] > 1 else torch.zeros_like(evidence), drafted  # one cancels
        return self.shard.join(leaf.terms_of(at_first, first - self.shard.start), drafted)

    @torch.no_grad()
    def shard_leaves(self, shard: Shard) -> None:
        """Keep the rows of `shard` only; `draft_params` then gathers those of the other ranks."""
        self.shard = shard
        rows = self.leaf_weight[:, :, shard.start : shard.stop].clone()
        self.leaf_weight = nn.Parameter(rows, requires_grad=False)

    @torch.no_grad()
    def pack(self, num_positions: int) -> None:
        """Lay out the weights of the first `num_positions` positions and of all sums for one oneDNN product.

        Does nothing for other dtypes than bfloat16 and on CPUs without bfloat16 products.
        """
        if self.hidden_dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return
        weights = [self.leaf_weight[:num_positions], self.root_weight, self.inner_weight]
        self._num_positions, self._hidden_dtype = num_positions, self.hidden_dtype
        none = weights[0].new_empty(0, self.hidden_size)
        rows = [none if weight is None else weight.reshape(-1, self.hidden_size) for weight in weights]
        self._parts = [len(part) for part in rows]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(rows), 1)
        self.leaf_weight = self.root_weight = self.inner_weight = None


def is_sharded(num_bytes: int, num_ranks: int, device_type: str) -> bool:
    """Return whether unembeddings of `num_bytes` are divided over the ranks of a tensor-parallel group."""
    return num_ranks > 1 and num_bytes >= SHARD_BYTES.get(device_type, SHARD_BYTES_GPU)
