"""Leaves with unembeddings of their own: U, trained, for each position and component (MtPC paper, section 4).

    leaf[k, z, :] = log_softmax(U[k, z] s_k)

A server may divide the unembeddings over ranks (`shard_leaves`) and then lay out all weights of the head for the
processor (`pack`). Such leaves can only draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vllm_mtpc.heads.leaves.base import INIT_STD, Leaves, LeavesOptions
from vllm_mtpc.kernels import leaf
from vllm_mtpc.kernels.leaf import LowRank

# Minimum bytes of unembeddings that are divided over the ranks: reading them must cost more than the gather.
# CPU: 22 GB/s against 0.24 to 0.6 ms of a gather (gloo, two ranks). GPU, not measured: 20 us at 3.3 TB/s.
SHARD_BYTES, SHARD_BYTES_GPU = {"cpu": 16 << 20}, 64 << 20


class Shard(NamedTuple):
    """The part of one rank in unembeddings that a tensor-parallel group divides; all-gathers copy bits."""

    rank: int
    size: int  # of the group
    vocab_size: int  # V
    gather: Callable[[Tensor], Tensor]  # [B, X] of every rank -> [size * B, X], in order of rank

    @property
    def rows(self) -> int:
        """Rows of every rank; the last ranks' rows may exceed the vocabulary."""
        return -(-self.vocab_size // self.size)

    @property
    def start(self) -> int:
        """First token of this rank."""
        return min(self.rank * self.rows, self.vocab_size)

    @property
    def stop(self) -> int:
        """Token after the last of this rank."""
        return min(self.start + self.rows, self.vocab_size)

    def join(self, terms: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return evidence [B, r] and logits [B, K, r, V] from `leaf.terms_of` and logits [B, K, r, rows]."""
        batch, num_drafts, r, _ = logits.shape
        own = F.pad(logits, (0, self.rows - logits.shape[3])).flatten(1)
        numbers = terms.contiguous().flatten(1).view(logits.dtype)  # as bits: not rounded
        sent, width = torch.cat([numbers, own], dim=1), numbers.shape[1]
        parts = self.gather(sent).view(self.size, *sent.shape)
        norms, picked = parts[..., :width].contiguous().view(torch.float32).view(self.size, batch, 2, r).unbind(2)
        whole = parts[..., width:].unflatten(2, (num_drafts, r, self.rows)).permute(1, 2, 3, 0, 4).flatten(3)
        return picked.amax(dim=0) - norms.logsumexp(dim=0), whole[..., : self.vocab_size]


class OwnOptions(LeavesOptions):
    """Section of `config.json`."""

    kind: Literal["own"] = Field(description="trained unembeddings, for small vocabularies")

    @classmethod
    def defaults(cls, target: Any) -> dict[str, Any]:
        return {"token_rank": 0}


class OwnLeaves(Leaves):
    """Parameters: leaf_weight [n - skip, r, columns, D] in position order."""

    Options = OwnOptions
    component_dims: ClassVar = {"leaf_weight": (1,)}
    noise_in = "leaf_weight"

    def __init__(self, options: OwnOptions, *sizes: Any) -> None:
        super().__init__(options, *sizes)
        shape = self.num_leaves, self.num_components, self.columns, self.hidden_size
        self.leaf_weight = nn.Parameter(torch.empty(shape))
        self.shard: Shard | None = None
        self._packed: Tensor | None = None  # replaces all weights
        self.packed_dtype: torch.dtype | None = None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.leaf_weight.normal_().mul_(INIT_STD)

    def base(self, states: Tensor, start: int, stop: int) -> tuple[Tensor, LowRank | None]:
        weight, rows = self.leaf_weight[start - self.skip : stop - self.skip], self.rows_of(states, start, stop)
        if rows.shape[1] == 1:
            return F.linear(rows[:, 0], weight.flatten(0, 2)).view(len(rows), *weight.shape[:3]), None
        return torch.einsum("bkd,kzvd->bkzv", rows, weight), None

    def draft(self, states: Tensor, first: Tensor, stop: int) -> tuple[Tensor | None, Tensor, LowRank | None]:
        logits = self(states, 0, stop)
        return *self._join_ranks(logits[:, 0], logits[:, 1:], first), None

    def _join_ranks(self, at_first: Tensor, drafted: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Return evidence and leaf from the logits [B, r, V] of x_1 and [B, K, r, V] of the drafts, of this rank."""
        if self.shard is None:
            evidence = leaf.evidence_of(at_first, first)
            return evidence if evidence.shape[1] > 1 else torch.zeros_like(evidence), drafted  # one cancels
        return self.shard.join(leaf.terms_of(at_first, first - self.shard.start), drafted)

    @torch.no_grad()
    def shard_leaves(self, shard: Shard) -> None:
        """Keep the rows of `shard` only; `draft` then gathers those of the other ranks."""
        self.shard = shard
        rows = self.leaf_weight[:, :, shard.start : shard.stop].clone()
        self.leaf_weight = nn.Parameter(rows, requires_grad=False)

    @torch.no_grad()
    def pack(self, stop: int, sums: Sequence[Tensor | None]) -> bool:
        """Lay out the weights of the positions before `stop` and of `sums` [., D] for one oneDNN product of a state.

        Does nothing and returns False for other dtypes than bfloat16 and on CPUs without bfloat16 products.
        """
        if self.leaf_weight.dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        weights = [self.leaf_weight[: stop - self.skip], *sums]
        self._num_packed, self.packed_dtype = len(weights[0]), self.leaf_weight.dtype
        none = self.leaf_weight.new_empty(0, self.hidden_size)
        rows = [none if weight is None else weight.reshape(-1, self.hidden_size) for weight in weights]
        self._parts = [len(part) for part in rows]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(torch.cat(rows), 1)
        self.leaf_weight = None
        return True

    def draft_packed(self, states: Tensor, first: Tensor, num_drafts: int) -> tuple[Tensor, ...]:
        """Return evidence and leaf, and the products of the sums [B, .], of states [B, D] after `pack`."""
        product = torch.ops.mkldnn._linear_pointwise(states, self._packed, None, "none", [], "")
        leaves, *sums = product.split(self._parts, dim=1)
        logits = leaves.view(len(states), self._num_packed, self.num_components, -1)
        if self.skip:
            evidence = states.new_zeros(len(states), self.num_components, dtype=torch.float32)
            return evidence, logits[:, :num_drafts], *sums
        return *self._join_ranks(logits[:, 0], logits[:, 1 : num_drafts + 1], first), *sums


def is_sharded(num_bytes: int, num_ranks: int, device_type: str) -> bool:
    """Return whether unembeddings of `num_bytes` are divided over the ranks of a tensor-parallel group."""
    return num_ranks > 1 and num_bytes >= SHARD_BYTES.get(device_type, SHARD_BYTES_GPU)
