"""KV blocks of auxiliary rows: a group reads its request's own blocks, and writes to blocks that belong to nobody.

The block in which a group's first row falls holds tokens of the request as well; it is copied, whole, before the group
writes behind them, however a backend lays out its inside. So the KV cache of requests is that of committed tokens and
of the drafts under verification, and positions beyond a request's blocks have a place that is not another's.

    request      [ block 7 ][ block 2 ][ block 9: x x . . ]
    its group    [ block 7 ][ block 2 ][ copy:    x x u u ][ own: u . . . ]
"""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Block tables and slots of groups; the blocks [first_block, first_block + groups * blocks_per_group) are its own.

    `table_width`: blocks of a request's row in vLLM's block table.
    """

    def __init__(
        self,
        first_block: int,
        block_size: int,
        blocks_per_group: int,
        max_groups: int,
        table_width: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.table_width = table_width + blocks_per_group
        self.extra = torch.arange(blocks_per_group, device=device)
        own = torch.arange(max_groups * blocks_per_group, device=device) + first_block
        self.own = own.view(max_groups, blocks_per_group)  # [groups, P]
        self.tables = torch.zeros(max_groups, self.table_width, dtype=torch.int32, device=device)
        self.num_real = table_width

    def attach(self, prefix: Tensor, request_tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Block tables [G, W] of groups that see prefix[G] tokens, and the blocks to copy: from [G], to [G].

        request_tables [G, table_width]: the block tables of the groups' requests.
        """
        groups = prefix.shape[0]
        tables = self.tables[:groups]
        tables[:, : self.num_real].copy_(request_tables[:, : self.num_real])
        first = prefix.long() // self.block_size  # [G] block the first row falls in
        source = request_tables.gather(1, first.clamp(max=self.num_real - 1)[:, None])[:, 0].long()
        tables.scatter_(1, first[:, None] + self.extra, self.own[:groups].to(torch.int32))
        return tables, source, self.own[:groups, 0]

    def slots(self, group: Tensor, prefix: Tensor, position: Tensor) -> Tensor:
        """Slots [T] int64 of rows at position[T] (>= prefix[T]) in groups group[T] that see prefix[T] tokens."""
        block = position // self.block_size - prefix // self.block_size
        return self.own[group, block] * self.block_size + position % self.block_size
