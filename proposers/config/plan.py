"""How many auxiliary rows a pass carries at each batch size, and the KV blocks set aside for them.

A *group* is a run of auxiliary rows that reads a request's first c tokens and itself. Two passes have one group per
request, led by the token that was just chosen; the merged pass has one per number of drafts that may turn out to be
accepted. `max_aux_rows` limits the rows of a whole batch: larger batches draft less, and beyond the last size not at
all. Everything here follows from the configuration alone: the scheduler's process and every worker agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from vllm_mtpc.proposers.config.groups import doubled, drafts_of_rows, tables_by_batch

if TYPE_CHECKING:
    from vllm_mtpc.config.ptp import PtpConfig

ASSUMED = 0.7  # chance of a further draft to be right, for a head that was never measured


@dataclass(frozen=True)
class Bucket:
    """The groups of every request in a batch of at most `max_batch`: rows of each, by drafts accepted before it."""

    max_batch: int
    sizes: tuple[int, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """Accepted drafts d of the groups that have rows."""
        return tuple(d for d, size in enumerate(self.sizes) if size)

    @property
    def rows(self) -> int:
        """Auxiliary rows per request."""
        return sum(self.sizes)


@dataclass(frozen=True)
class Plan:
    """Buckets by batch size; `leading`: rows of real tokens at the head of each group (two passes: 1, merged: 0)."""

    buckets: tuple[Bucket, ...]
    leading: int
    dynamic: bool = False

    def bucket(self, num_reqs: int) -> Bucket | None:
        """The groups for a batch; None where it is not drafted for."""
        found = next((bucket for bucket in self.buckets if num_reqs <= bucket.max_batch), None)
        return found if found is not None and found.rows else None

    def num_groups(self, bucket: Bucket) -> int:
        """Groups per request; with dynamic sizes each of them may get rows."""
        return len(bucket.sizes) if self.dynamic and bucket.rows else len(bucket.groups)

    @property
    def max_groups(self) -> int:
        """Groups of the largest batch."""
        return max((bucket.max_batch * self.num_groups(bucket) for bucket in self.buckets), default=0)

    @property
    def max_group_rows(self) -> int:
        """Rows of the longest group, its leading ones included."""
        longest = max((bucket.rows if self.dynamic else max(bucket.sizes) for bucket in self.buckets), default=0)
        return longest + self.leading

    @property
    def max_rows(self) -> int:
        """Rows of the groups of a whole batch."""
        drafting = (bucket for bucket in self.buckets if bucket.rows)
        return max((bucket.max_batch * (bucket.rows + self.leading) for bucket in drafting), default=0)

    def blocks_per_group(self, block_size: int) -> int:
        """KV blocks a group needs: it may start anywhere in its first one."""
        return -(-(block_size - 1 + self.max_group_rows) // block_size)

    def num_blocks(self, block_size: int) -> int:
        """KV blocks set aside for auxiliary rows."""
        return self.max_groups * self.blocks_per_group(block_size)


def accepted_of(head: PtpConfig) -> list[float]:
    """P(exactly g drafts accepted), g = 0 .. n - 1: as measured, else independent drafts that are right at ASSUMED."""
    if head.accepted is not None:
        return list(head.accepted)
    last = head.window - 1
    return [ASSUMED**g * (1 - ASSUMED) for g in range(last)] + [ASSUMED**last]


def two_pass_plan(head: PtpConfig, num_drafts: int, max_num_seqs: int, max_aux_rows: int) -> Plan:
    """One group per request; its first draft comes from the leading token's own row.

    K drafts need K auxiliary rows (o-ptp: one of them only says which token the first draft is) or K - 1 (c-ptp).
    """
    full = num_drafts if head.variant == "o-ptp" else max(1, num_drafts - 1)
    buckets: list[Bucket] = []
    for batch in doubled(max_num_seqs):
        rows = min(full, max_aux_rows // batch - 1)
        if rows >= 1:
            buckets.append(Bucket(batch, (rows,)))
    return Plan(_merged(buckets), leading=1)


def merged_plan(
    head: PtpConfig,
    num_drafts: int,
    max_num_seqs: int,
    max_aux_rows: int,
    rows_per_request: int | None = None,
    dynamic: bool = False,
) -> Plan:
    """Groups of the merged pass, sizes chosen from the head's measured acceptance (groups.py)."""
    tables = tables_by_batch(
        accepted_of(head), num_drafts, head.variant, head.window, max_num_seqs, max_aux_rows, rows_per_request
    )
    buckets = [Bucket(batch, table.sizes) for batch, table in tables if table.expected_tokens > 1]
    return Plan(_merged(buckets), leading=0, dynamic=dynamic)


def scheduled_plan(plan_of: Callable[[int], Plan], drafts_by_batch: Sequence[int]) -> Plan:
    """One plan of those for each number of drafts: drafts_by_batch[n - 1] of them in a batch of n, 0: no rows.

    plan_of(K) is the plan for K drafts in every batch.
    """
    plans = {drafts: plan_of(drafts) for drafts in set(drafts_by_batch) if drafts}
    width = 1 + max(plans, default=0)
    buckets: list[Bucket] = []
    for batch, drafts in enumerate(drafts_by_batch, start=1):
        bucket = plans[drafts].bucket(batch) if drafts else None
        sizes = bucket.sizes if bucket else ()
        # a step may still verify the drafts of a smaller batch: groups of more than its own K exist, without rows
        buckets.append(Bucket(batch, sizes + (0,) * (width - len(sizes))))
    some = next(iter(plans.values()), Plan((), leading=0))
    return Plan(_merged(buckets), some.leading, some.dynamic)


def most_drafts(bucket: Bucket | None, variant: str, leading: int) -> int:
    """The most drafts that a group of a bucket can give."""
    if bucket is None:
        return 0
    rows = max(bucket.sizes)
    return rows + (variant != "o-ptp") if leading else int(drafts_of_rows(np.array(rows), variant))


def _merged(buckets: list[Bucket]) -> tuple[Bucket, ...]:
    """Neighbours with the same groups as one."""
    return tuple(list(same)[-1] for _, same in groupby(buckets, key=lambda bucket: bucket.sizes))
