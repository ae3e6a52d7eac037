"""Groups of auxiliary rows: where their rows stand, how many each has, and which blocks of the KV cache are theirs.

A group reads its request's own blocks, and writes to blocks that belong to nobody. The block in which its first row
falls holds tokens of the request as well; it is copied, whole, before the group writes behind them, however a backend
lays out its inside. So the KV cache of requests is that of committed tokens and of the drafts under verification, and
positions beyond a request's blocks have a place that is not another's.

    request      [ block 7 ][ block 2 ][ block 9: x x . . ]
    its group    [ block 7 ][ block 2 ][ copy:    x x u u ][ own: u . . . ]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_mtpc.proposers.config.plan import VARIANTS, Bucket, accepted_of

if TYPE_CHECKING:
    from vllm_mtpc.config.ptp import PtpConfig


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


class Layout(NamedTuple):
    """B rows in G groups, for each of R requests; where all requests have the same, tensors are expanded views."""

    rows: int  # B
    longest: int  # rows of the longest group there may be
    accepted: Tensor  # [R, G] drafts accepted in front of each group
    sizes: Tensor  # [R, G] rows of each
    group: Tensor  # [R, B] group of each row
    offset: Tensor  # [R, B] its place in the group
    index_of: Tensor  # [K + 1] group behind d accepted drafts; -1: none
    sizes_cpu: Tensor  # [G], of a static layout

    @property
    def num_groups(self) -> int:
        """G."""
        return self.sizes.shape[1]

    def of(self, num_reqs: int) -> Layout:
        """The same groups for each of num_reqs requests."""
        parts = {name: getattr(self, name) for name in ("accepted", "sizes", "group", "offset")}
        return self._replace(**{name: part[:1].expand(num_reqs, -1) for name, part in parts.items()})

    def behind(self, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """First row and number of rows [R] of the group behind accepted[R] drafts; no rows where there is none."""
        group = self.index_of[accepted]
        index, ends = group.clamp(min=0)[:, None], self.sizes.cumsum(1)
        sizes = self.sizes.gather(1, index)[:, 0]
        return ends.gather(1, index)[:, 0] - sizes, torch.where(group >= 0, sizes, 0)


def _layout(rows: int, longest: int, accepted: Tensor, sizes: Tensor, index_of: Tensor, sizes_cpu: Tensor) -> Layout:
    """A request's rows follow each other, group by group."""
    ends = sizes.cumsum(1)
    row = torch.arange(rows, device=sizes.device).expand(len(sizes), -1).contiguous()
    group = torch.searchsorted(ends, row, right=True).clamp(max=sizes.shape[1] - 1)
    offset = row - (ends - sizes).gather(1, group)
    return Layout(rows, longest, accepted, sizes, group, offset, index_of, sizes_cpu)


def static_layout(bucket: Bucket, device: torch.device) -> Layout:
    """The layout of one request; groups without rows are left out."""
    groups = torch.tensor(bucket.groups)
    sizes, index_of = torch.tensor(bucket.sizes)[groups], torch.full((len(bucket.sizes),), -1)
    index_of[groups] = torch.arange(len(groups))
    accepted, rows, index_of = (part.to(device) for part in (groups[None], sizes[None], index_of))
    return _layout(bucket.rows, int(sizes.max()), accepted, rows, index_of, sizes)


def survival_of(head: PtpConfig, device: torch.device) -> Tensor:
    """Chance that at least d drafts are accepted, for d = 0, 1, ...; from what the head was measured to do."""
    accepted = torch.tensor(accepted_of(head), device=device)
    return accepted.flip(0).cumsum(0).flip(0)


def dynamic_layout(bucket: Bucket, confidence: Tensor, survival: Tensor, head: PtpConfig) -> Layout:
    """As many rows, given to the groups of each request by how sure its drafts were: confidence [R, K].

    survival: of `survival_of`, made once: a list copied to the device in a step would wait for it.
    """
    sizes = dynamic_sizes(confidence, survival, bucket.rows, variant=head.variant, window=head.window)  # [R, K + 1]
    each = torch.arange(sizes.shape[1], device=confidence.device)
    return _layout(bucket.rows, bucket.rows, each.expand_as(sizes), sizes, each, torch.empty(0))


def dynamic_sizes(confidence: Tensor, survival: Tensor, budget: int, variant: str, window: int) -> Tensor:
    """Rows [R, K + 1] of each group, from how sure the drafts of a step are: confidence[R, K], 0 where there is none.

    Maximises sum_d A_d E[drafts right in the group of d], A_d = P(exactly d are accepted) under ``confidence``, by the
    largest gains per row; ``survival``[1 + g] = P(at least g drafts of a new group are right). Rows sum to ``budget``,
    or to what all groups can use if that is less. No synchronisation with the host.
    """
    lead, drafts = VARIANTS[variant], confidence.shape[1]
    most = min(window, drafts + lead)
    reach = F.pad(confidence.float().clamp(0, 1).cumprod(1), (1, 0), value=1.0)  # [R, K + 1]
    exactly = reach - F.pad(reach[:, 1:], (0, 1))
    gain = survival.to(exactly)[1 : most - lead + 1]
    gain = F.pad(gain, (0, most - lead - len(gain))).cummin(0).values  # [drafts] of each further one
    rate = gain
    if lead:  # the first row earns nothing by itself: its cost is shared by the drafts it is best shared by
        mean = gain.cumsum(0) / torch.arange(2, most + 1, device=gain.device)
        best = mean.max().expand(most)
        shared = torch.arange(most, device=gain.device) <= mean.argmax() + 1
        rate = torch.where(shared, best, F.pad(gain, (1, 0)))
    rates = (exactly[..., None] * rate).flatten(1)  # [R, (K + 1) * most]: falling within each group
    order = rates.argsort(dim=1, descending=True, stable=True)[:, : max(0, budget)]
    sizes = torch.zeros_like(exactly, dtype=torch.long)
    sizes.scatter_add_(1, order // most, torch.ones_like(order))
    return _no_single_rows(sizes, exactly, gain, most) if lead else sizes


def _no_single_rows(sizes: Tensor, exactly: Tensor, gain: Tensor, most: int) -> Tensor:
    """Gives the row of a group that has but one (o-ptp: of no use; there is one such group at most) to the best other.

    sizes, exactly: [R, K + 1]; gain: [drafts] of each further draft of a group.
    """
    further = exactly * gain[(sizes - 1).clamp(0, len(gain) - 1)]
    further = further.masked_fill((sizes < 2) | (sizes >= most), -1.0)
    value, taker = further.max(1, keepdim=True)
    moved = (sizes == 1) & (value >= 0)
    sizes = torch.where(moved, 0, sizes)
    return sizes.scatter_add(1, taker, moved.sum(1, keepdim=True))
