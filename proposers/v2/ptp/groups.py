"""Groups of auxiliary rows with their blocks of the KV cache, and the PTP student, whose attention reads them.

The student is a copy of the target's module tree with adapters on its linear layers.

A group reads its request's blocks and writes to its own. The block in which its first row falls also holds tokens of
the request; it is copied whole before the group writes, whatever layout a backend has inside a block.

    request      [ block 7 ][ block 2 ][ block 9: x x . . ]
    its group    [ block 7 ][ block 2 ][ copy:    x x u u ][ own: u . . . ]
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.proposers.v2.lora import Gate, Replace, copy_adapted


class GroupBlocks:
    """Block tables and KV slots of groups; own: [max_groups, P], the blocks of each; table_width: of a request."""

    def __init__(self, own: Tensor, block_size: int, table_width: int) -> None:
        self.own, self.block_size, self.table_width = own, block_size, table_width
        max_groups, blocks = own.shape
        self.own_index = torch.arange(blocks, device=own.device)
        self.tables = torch.zeros(max_groups, table_width + blocks, dtype=torch.int32, device=own.device)

    def fill_tables(self, prefix: Tensor, request_tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fill the block tables of G groups that read prefix [G] tokens of requests with tables [G, table_width].

        Returns:
            Block tables [G, W], and the blocks to copy: from [G], to [G].
        """
        groups = prefix.shape[0]
        tables = self.tables[:groups]
        tables[:, : self.table_width].copy_(request_tables[:, : self.table_width])
        first = prefix.long() // self.block_size  # [G], the block that the first row falls in
        source = request_tables.gather(1, first.clamp(max=self.table_width - 1)[:, None])[:, 0].long()
        tables.scatter_(1, first[:, None] + self.own_index, self.own[:groups].to(torch.int32))
        return tables, source, self.own[:groups, 0]

    def slots(self, group: Tensor, prefix: Tensor, index: Tensor) -> Tensor:
        """Return the KV slots [T], int64, of rows at index [T] >= prefix [T] of their texts, in groups [T]."""
        block = index // self.block_size - prefix // self.block_size
        return self.own[group, block] * self.block_size + index % self.block_size


class Layout(NamedTuple):
    """The groups of each request in a batch; groups without rows are left out."""

    rows: int  # B, of all groups
    longest: int  # rows of the longest group
    accepted: Tensor  # [G], accepted drafts before each group
    sizes: Tensor  # [G], rows of each group
    sizes_cpu: Tensor  # the same on the host
    group: Tensor  # [B], group of each row
    offset: Tensor  # [B], index of each row in its group
    index_of: Tensor  # [K + 1], group that follows d accepted drafts; -1: none

    @classmethod
    def create(cls, by_accepted: tuple[int, ...], device: torch.device) -> Layout:
        """Place groups of by_accepted[d] rows for d accepted drafts."""
        whole = torch.tensor(by_accepted)
        groups, index_of = whole.nonzero()[:, 0], torch.full_like(whole, -1)
        sizes, rows = whole[groups], sum(by_accepted)
        index_of[groups] = torch.arange(len(groups))
        group = torch.arange(len(groups)).repeat_interleave(sizes)
        offset = torch.arange(rows) - (sizes.cumsum(0) - sizes)[group]
        placed = (part.to(device) for part in (groups, sizes, sizes, group, offset, index_of))
        return cls(rows, int(sizes.max()), *placed)._replace(sizes_cpu=sizes)

    def find_group(self, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Return first row [R] and number of rows [R] of the group that follows accepted [R] drafts; 0 rows if none."""
        group = self.index_of[accepted]
        sizes = self.sizes[group.clamp(min=0)]
        return self.sizes.cumsum(0)[group.clamp(min=0)] - sizes, torch.where(group >= 0, sizes, 0)


class Writes:
    """The KV cache writes of a pass, besides those to its rows' own slots."""

    num_real: int = 0  # rows of the target's own batch, at the front
    real_slots: Tensor | None = None  # [num_real], int64
    source: Tensor | None = None  # [G], blocks that are copied ...
    target: Tensor | None = None  # [G], ... to these


class GroupAttention(nn.Module):
    """An attention layer of the target: real rows are written, then blocks copied, then every row written and read."""

    def __init__(self, layer: Attention, writes: Writes) -> None:
        super().__init__()
        self.layer, self.writes = layer, writes

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer, writes = self.layer, self.writes
        cache = layer.kv_cache
        if writes.source is not None and cache.numel():
            if writes.num_real:
                keys = key[: writes.num_real].view(-1, layer.num_kv_heads, layer.head_size)
                values = value[: writes.num_real].view(-1, layer.num_kv_heads, layer.head_size_v)
                layer.impl.do_kv_cache_update(layer, keys, values, cache, writes.real_slots)
            blocks = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # float8 cannot be indexed
            blocks[writes.target] = blocks[writes.source]
        return layer(query, key, value, *args, **kwargs)


def build_student(target: nn.Module, lora: dict[str, Tensor], scale: float, gate: Gate, writes: Writes) -> nn.Module:
    """Build the student of a vLLM target; CheckpointError: an adapter has no layer in the target."""

    def copy_attention(name: str, module: nn.Module, replace: Replace) -> nn.Module | None:
        return GroupAttention(module, writes) if isinstance(module, Attention) else None

    return copy_adapted(target, {"": target}, lora, scale, gate, copy_attention)[0]


def check_attention(kv_cache_config: KVCacheConfig, attn_groups: list[list[Any]]) -> None:
    """Raise ServeConfigError for several KV cache groups, and for a backend whose cache groups cannot use."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], FullAttentionSpec):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        allowed = "allowed are targets whose layers all have full attention; serve it with an MtPC head"
        raise ServeConfigError(f"method 'ptp' on a target with layers of kind {kinds}: {allowed}")
    for group in attn_groups[0]:
        subject, size = f"method 'ptp': attention backend {group.backend.get_name()}", group.kernel_block_size
        if size is not None:
            reason = f"splits blocks of {specs[0].block_size} tokens; allowed is a block size of its own"
            raise ServeConfigError(f"{subject} {reason}; add --block-size {size}")
        if group.backend.forward_includes_kv_cache_update:
            reason = "writes the KV cache inside its kernel; allowed are those that write it first"
            raise ServeConfigError(f"{subject} {reason}; add --attention-backend FLASH_ATTN")
