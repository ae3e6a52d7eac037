"""Groups of auxiliary rows: how many rows each has, which row belongs to which, and their blocks of the KV cache.

A group reads its request's blocks and writes to its own. The block in which its first row falls also holds tokens of
the request; it is copied whole before the group writes, whatever layout a backend has inside a block.

    request      [ block 7 ][ block 2 ][ block 9: x x . . ]
    its group    [ block 7 ][ block 2 ][ copy:    x x u u ][ own: u . . . ]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.plan.row_groups import Bucket


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
    def create(cls, bucket: Bucket, device: torch.device) -> Layout:
        groups = torch.tensor(bucket.groups)
        sizes, index_of = torch.tensor(bucket.sizes)[groups], torch.full((len(bucket.sizes),), -1)
        index_of[groups] = torch.arange(len(groups))
        group = torch.arange(len(groups)).repeat_interleave(sizes)
        offset = torch.arange(bucket.rows) - (sizes.cumsum(0) - sizes)[group]
        placed = (part.to(device) for part in (groups, sizes, sizes, group, offset, index_of))
        return cls(bucket.rows, int(sizes.max()), *placed)._replace(sizes_cpu=sizes)

    def find_group(self, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Return first row [R] and number of rows [R] of the group that follows accepted [R] drafts; 0 rows if none."""
        group = self.index_of[accepted]
        sizes = self.sizes[group.clamp(min=0)]
        return self.sizes.cumsum(0)[group.clamp(min=0)] - sizes, torch.where(group >= 0, sizes, 0)
