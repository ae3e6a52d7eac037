"""What rows of a student's pass are made of: the requests of the step, and blocks of the KV cache for auxiliary rows.

A group of auxiliary rows reads its request's own blocks, and writes to blocks that belong to nobody. The block in which
a group's first row falls holds tokens of the request as well; it is copied, whole, before the group writes behind them,
however a backend lays out its inside. So the KV cache of requests is that of committed tokens and of the drafts under
verification, and positions beyond a request's blocks have a place that is not another's.

    request      [ block 7 ][ block 2 ][ block 9: x x . . ]
    its group    [ block 7 ][ block 2 ][ copy:    x x u u ][ own: u . . . ]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_mtpc.proposers.v2.coupled import u_of


@dataclass
class RowBatch:
    """R requests; S are the slots of vLLM's states. What sampling tells (None: it is still to come) is for drafts."""

    input_batch: InputBatch
    temperature: Tensor  # [S]
    seeds: Tensor  # [S]
    num_sampled: Tensor | None = None  # [R], 0: the prompt is not read to its end
    num_rejected: Tensor | None = None  # [R]
    last_sampled: Tensor | None = None  # [S, 1]
    next_prefill_tokens: Tensor | None = None  # [lookahead, S]

    @cached_property
    def num_reqs(self) -> int:
        return self.input_batch.num_reqs

    @cached_property
    def slots(self) -> Tensor:
        """[R]"""
        return self.input_batch.idx_mapping[: self.num_reqs]

    @cached_property
    def prefix(self) -> Tensor:
        """Committed tokens [R] of each request, x_1 not among them."""
        ends = self.input_batch.query_start_loc[1 : self.num_reqs + 1]
        return self.input_batch.positions[(ends - self.num_rejected[: self.num_reqs] - 1).long()] + 1

    @cached_property
    def first(self) -> Tensor:
        """x_1 [R]; of requests whose prompt is not read to its end, the next token of it."""
        is_sampled = self.num_sampled[: self.num_reqs] > 0
        return torch.where(is_sampled, self.last_sampled[self.slots, 0], self.next_prefill_tokens[0, self.slots].long())

    @cached_property
    def is_greedy(self) -> Tensor:
        """[R]"""
        return self.temperature[self.slots] == 0

    def u(self, keys: Tensor) -> Tensor:
        """u [R, A] of the tokens that follow positions keys[R, A]."""
        requests = self.slots[:, None].expand_as(keys).flatten()
        return u_of(self.seeds, self.temperature, requests, keys.flatten()).view_as(keys)


class Scratch:
    """Block tables and slots of groups; own [groups, P] are the blocks that belong to each.

    `table_width`: blocks of a request's row in vLLM's block table.
    """

    def __init__(self, own: Tensor, block_size: int, table_width: int) -> None:
        self.own, self.block_size, self.num_real = own, block_size, table_width
        max_groups, blocks = own.shape
        self.extra = torch.arange(blocks, device=own.device)
        self.tables = torch.zeros(max_groups, table_width + blocks, dtype=torch.int32, device=own.device)

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
