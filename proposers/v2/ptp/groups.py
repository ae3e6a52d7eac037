"""Groups of auxiliary rows: how many rows each has, which row belongs to which, and their blocks of the KV cache.

A group reads its request's blocks and writes to its own. The block in which its first row falls also holds
tokens of the request; it is copied whole before the group writes, whatever layout a backend has inside a block. So the
KV cache of requests holds committed tokens and drafts under verification only.

    request      [ block 7 ][ block 2 ][ block 9: x x . . ]
    its group    [ block 7 ][ block 2 ][ copy:    x x u u ][ own: u . . . ]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mtpc.plan.row_groups import VARIANTS, Bucket, accepted_of

if TYPE_CHECKING:
    from vllm_mtpc.config.ptp_config import PtpConfig


class GroupBlocks:
    """Block tables and KV slots of groups.

    Args:
        own: [max_groups, P], the blocks of each group.
        block_size: tokens of a block.
        table_width: blocks of a request's row in vLLM's block table.
    """

    def __init__(self, own: Tensor, block_size: int, table_width: int) -> None:
        self.own, self.block_size, self.table_width = own, block_size, table_width
        max_groups, blocks = own.shape
        self.own_index = torch.arange(blocks, device=own.device)
        self.tables = torch.zeros(max_groups, table_width + blocks, dtype=torch.int32, device=own.device)

    def fill_tables(self, prefix: Tensor, request_tables: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Fill the block tables of G groups.

        Args:
            prefix: [G], tokens that each group reads of its request.
            request_tables: [G, table_width], block tables of the groups' requests.

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
    """B rows in G groups for each of R requests; tensors are expanded views where all requests have the same."""

    rows: int  # B
    longest: int  # bound on the rows of a group
    accepted: Tensor  # [R, G], accepted drafts before each group
    sizes: Tensor  # [R, G], rows of each group
    group: Tensor  # [R, B], group of each row
    offset: Tensor  # [R, B], index of each row in its group
    index_of: Tensor  # [K + 1], group that follows d accepted drafts; -1: none
    sizes_cpu: Tensor  # [G], of a static layout

    @property
    def num_groups(self) -> int:
        """G."""
        return self.sizes.shape[1]

    def expand(self, num_reqs: int) -> Layout:
        """Return the layout of one request for each of `num_reqs` requests."""
        parts = {name: getattr(self, name) for name in ("accepted", "sizes", "group", "offset")}
        return self._replace(**{name: part[:1].expand(num_reqs, -1) for name, part in parts.items()})

    def find_group(self, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Return first row [R] and number of rows [R] of the group that follows accepted [R] drafts; 0 rows if none."""
        group = self.index_of[accepted]
        index, ends = group.clamp(min=0)[:, None], self.sizes.cumsum(1)
        sizes = self.sizes.gather(1, index)[:, 0]
        return ends.gather(1, index)[:, 0] - sizes, torch.where(group >= 0, sizes, 0)


def _make_layout(
    rows: int, longest: int, accepted: Tensor, sizes: Tensor, index_of: Tensor, sizes_cpu: Tensor
) -> Layout:
    """Place a request's rows group after group."""
    ends = sizes.cumsum(1)
    row = torch.arange(rows, device=sizes.device).expand(len(sizes), -1).contiguous()
    group = torch.searchsorted(ends, row, right=True).clamp(max=sizes.shape[1] - 1)
    offset = row - (ends - sizes).gather(1, group)
    return Layout(rows, longest, accepted, sizes, group, offset, index_of, sizes_cpu)


def make_static_layout(bucket: Bucket, device: torch.device) -> Layout:
    """Return the layout of one request with the group sizes of a bucket; groups without rows are left out."""
    groups = torch.tensor(bucket.groups)
    sizes, index_of = torch.tensor(bucket.sizes)[groups], torch.full((len(bucket.sizes),), -1)
    index_of[groups] = torch.arange(len(groups))
    accepted, rows, index_of = (part.to(device) for part in (groups[None], sizes[None], index_of))
    return _make_layout(bucket.rows, int(sizes.max()), accepted, rows, index_of, sizes)


def cumulative_acceptance(head: PtpConfig, device: torch.device) -> Tensor:
    """Return P(at least d drafts are accepted) for d = 0, 1, .., from the head's measured distribution."""
    accepted = torch.tensor(accepted_of(head), device=device)
    return accepted.flip(0).cumsum(0).flip(0)


def make_dynamic_layout(bucket: Bucket, confidence: Tensor, acceptance: Tensor, head: PtpConfig) -> Layout:
    """Return a layout whose rows go to the groups of each request by the confidence [R, K] of its drafts.

    acceptance: of `cumulative_acceptance`, computed once: to copy a list to the device would wait for it.
    """
    sizes = dynamic_sizes(confidence, acceptance, bucket.rows, variant=head.variant, window=head.window)  # [R, K + 1]
    each = torch.arange(sizes.shape[1], device=confidence.device)
    return _make_layout(bucket.rows, bucket.rows, each.expand_as(sizes), sizes, each, torch.empty(0))


def dynamic_sizes(confidence: Tensor, acceptance: Tensor, budget: int, variant: str, window: int) -> Tensor:
    """Return the rows [R, K + 1] of each group, which maximise sum_d A_d E[right drafts in the group of d].

    A_d = P(exactly d drafts are accepted), from `confidence`. Rows are given by the largest gain per row. There is no
    synchronisation with the host.

    Args:
        confidence: [R, K], probability of each draft of the step; 0 where there is none.
        acceptance: `acceptance[1 + g]` = P(at least g drafts of a new group are right).
        budget: rows of a request. The sizes sum to it, or to what all groups can use if that is less.
    """
    lead, drafts = VARIANTS[variant], confidence.shape[1]
    max_rows = min(window, drafts + lead)  # of a group
    reach = F.pad(confidence.float().clamp(0, 1).cumprod(1), (1, 0), value=1.0)  # [R, K + 1]
    exactly = reach - F.pad(reach[:, 1:], (0, 1))
    gain = acceptance.to(exactly)[1 : max_rows - lead + 1]
    gain = F.pad(gain, (0, max_rows - lead - len(gain))).cummin(0).values  # [drafts], of each further one
    rate = gain
    if lead:  # the first row gains nothing by itself: the drafts that share its cost best share it
        mean = gain.cumsum(0) / torch.arange(2, max_rows + 1, device=gain.device)
        best = mean.max().expand(max_rows)
        shared = torch.arange(max_rows, device=gain.device) <= mean.argmax() + 1
        rate = torch.where(shared, best, F.pad(gain, (1, 0)))
    rates = (exactly[..., None] * rate).flatten(1)  # [R, (K + 1) * max_rows], falling within each group
    order = rates.argsort(dim=1, descending=True, stable=True)[:, : max(0, budget)]
    sizes = torch.zeros_like(exactly, dtype=torch.long)
    sizes.scatter_add_(1, order // max_rows, torch.ones_like(order))
    return _move_single_row(sizes, exactly, gain, max_rows) if lead else sizes


def _move_single_row(sizes: Tensor, exactly: Tensor, gain: Tensor, max_rows: int) -> Tensor:
    """Give the row of a group with one row to the best other group: o-ptp drafts nothing from one row.

    A request has at most one such group. sizes, exactly: [R, K + 1]; gain: [drafts], of each further draft of a group.
    """
    further = exactly * gain[(sizes - 1).clamp(0, len(gain) - 1)]
    further = further.masked_fill((sizes < 2) | (sizes >= max_rows), -1.0)
    value, taker = further.max(1, keepdim=True)
    moved = (sizes == 1) & (value >= 0)
    sizes = torch.where(moved, 0, sizes)
    return sizes.scatter_add(1, taker, moved.sum(1, keepdim=True))
