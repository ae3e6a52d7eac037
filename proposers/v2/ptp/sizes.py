"""Where the auxiliary rows of a merged pass stand: which group each belongs to, and how far into it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_mtpc.proposers.v2.ptp.groups import dynamic_sizes
from vllm_mtpc.proposers.v2.ptp.plan import Bucket, accepted_of

if TYPE_CHECKING:
    from vllm_mtpc.config.ptp import PtpConfig


@dataclass(frozen=True)
class Layout:
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
        return replace(self, **{name: part[:1].expand(num_reqs, -1) for name, part in parts.items()})

    def size_of(self, accepted: Tensor) -> Tensor:
        """Rows [R] of the group behind accepted[R] drafts; 0 where there is none."""
        group = self.index_of[accepted]
        return torch.where(group >= 0, self.sizes.gather(1, group.clamp(min=0)[:, None])[:, 0], 0)

    def start_of(self, accepted: Tensor) -> Tensor:
        """First row [R] of that group."""
        before = self.sizes.cumsum(1) - self.sizes
        return before.gather(1, self.index_of[accepted].clamp(min=0)[:, None])[:, 0]


def static_layout(bucket: Bucket, device: torch.device) -> Layout:
    """The layout of one request; groups without rows are left out."""
    groups = bucket.groups
    sizes = torch.tensor([bucket.sizes[d] for d in groups])
    index_of = torch.full((len(bucket.sizes),), -1)
    index_of[list(groups)] = torch.arange(len(groups))
    group = torch.arange(len(groups)).repeat_interleave(sizes)
    offset = torch.cat([torch.arange(size) for size in sizes.tolist()])
    parts = (torch.tensor(groups), sizes, group, offset)
    accepted, on_device, group, offset = (part[None].to(device) for part in parts)
    longest = int(sizes.max())
    return Layout(bucket.rows, longest, accepted, on_device, group, offset, index_of.to(device), sizes)


def survival_of(head: PtpConfig, device: torch.device) -> Tensor:
    """Chance that at least d drafts are accepted, for d = 0, 1, ...; from what the head was measured to do."""
    law = torch.tensor(accepted_of(head), device=device)
    return law.flip(0).cumsum(0).flip(0)


def dynamic_layout(bucket: Bucket, confidence: Tensor, survival: Tensor, head: PtpConfig) -> Layout:
    """As many rows, given to the groups of each request by how sure its drafts were: confidence [R, K].

    survival: of `survival_of`, made once: a list copied to the device in a step would wait for it.
    """
    device = confidence.device
    sizes = dynamic_sizes(confidence, survival, bucket.rows, variant=head.variant, window=head.window)  # [R, K + 1]
    ends = sizes.cumsum(1)
    row = torch.arange(bucket.rows, device=device).expand(len(sizes), -1).contiguous()
    group = torch.searchsorted(ends, row, right=True).clamp(max=sizes.shape[1] - 1)
    offset = row - (ends - sizes).gather(1, group)
    each = torch.arange(sizes.shape[1], device=device)
    accepted = each.expand_as(sizes)
    return Layout(bucket.rows, bucket.rows, accepted, sizes, group, offset, each, torch.empty(0))
