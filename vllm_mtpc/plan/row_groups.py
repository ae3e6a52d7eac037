"""Auxiliary rows of PTP heads: the groups of rows of each batch size, and their KV blocks.

A group is a run of auxiliary rows that attends to the first c tokens of a request and to itself. With two passes each
request has one group, after the token that was just sampled. The merged pass verifies v drafts and drafts for the next
step at once: since the number of accepted drafts d is not known yet, there is a group of n_d rows for each d.
Groups depend on the configuration alone: the scheduler's process and all workers have the same.

The steps of a request with the merged pass are a Markov chain with state v, the drafts of the step:

    P(d accepted | v) = S_d - S_(d+1) for d < v, S_v for d = v;   next v = drafts(n_d)
    drafts(n) = n - 1 (o-ptp: row 0 only carries the first token) or n (c-ptp), at most K

with S_g = P(at least g leading drafts are accepted), measured. A table maximises the tokens per step of the chain's
stationary distribution over all n with sum n_d <= B. To first order a change of n_d is worth pi_d w(drafts(n_d)): pi is
the stationary distribution of d, w(v) the value of starting a step with v drafts (performance difference lemma). From
several start tables, two groups exchange rows while tokens per step rise; each promising exchange is evaluated exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from vllm_mtpc.config.ptp_config import PtpConfig

MAX_ROUNDS = 100
MAX_STARTS = 8  # of each of the two kinds of start
MAX_EXCHANGES = 256  # evaluated exactly per round
# Chance that a request ends and another starts, which makes the stationary distribution unique
RESTART = 1e-9
VARIANTS = {"o-ptp": 1, "c-ptp": 0, "late": 1, "independent": 1}  # rows of a group without a draft
UNMEASURED_ACCEPTANCE = 0.7  # acceptance of a further draft, for a head that was not measured


class Bucket(NamedTuple):
    """The groups of each request in a batch."""

    max_batch: int  # the largest batch size
    sizes: tuple[int, ...]  # rows of the group for d accepted drafts, d = 0, 1, ...

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(d for d, size in enumerate(self.sizes) if size)

    @property
    def rows(self) -> int:
        return sum(self.sizes)


class RowGroups(NamedTuple):
    """Groups by batch size."""

    buckets: tuple[Bucket, ...]  # by increasing `max_batch`
    leading: int  # rows of real tokens at the start of each group (two passes: 1, merged: 0)

    def bucket(self, num_reqs: int) -> Bucket | None:
        """Return the groups for a batch of num_reqs; None if it has no drafts."""
        found = next((bucket for bucket in self.buckets if num_reqs <= bucket.max_batch), None)
        return found if found is not None and found.rows else None

    @property
    def max_groups(self) -> int:
        return max((bucket.max_batch * len(bucket.groups) for bucket in self.buckets), default=0)

    @property
    def max_group_rows(self) -> int:
        return max((max(bucket.sizes) for bucket in self.buckets), default=0) + self.leading

    @property
    def max_rows(self) -> int:
        drafting = (bucket for bucket in self.buckets if bucket.rows)
        return max((bucket.max_batch * (bucket.rows + self.leading) for bucket in drafting), default=0)

    def blocks_per_group(self, block_size: int) -> int:
        """Return the KV blocks of a group, which may start anywhere in its first block."""
        return -(-(block_size - 1 + self.max_group_rows) // block_size)

    def num_blocks(self, block_size: int) -> int:
        return self.max_groups * self.blocks_per_group(block_size)


class GroupTable(NamedTuple):
    """The groups of one request."""

    sizes: tuple[int, ...]  # rows of the group for d accepted drafts
    expected_tokens: float  # per step, stationary


def two_pass_groups(head: PtpConfig, num_drafts: int, max_num_seqs: int, max_aux_rows: int) -> RowGroups:
    """Return the groups of two passes: one group per request, whose first draft comes from the leading token's row.

    K drafts take K auxiliary rows (o-ptp) or K - 1 (c-ptp). For the arguments see `merged_groups`.
    """
    full = max(1, num_drafts - 1 + VARIANTS[head.variant])
    rows = {batch: min(full, max_aux_rows // batch - 1) for batch in _doubled(max_num_seqs)}
    return RowGroups(_merged([Bucket(batch, (count,)) for batch, count in rows.items() if count >= 1]), leading=1)


def merged_groups(head: PtpConfig, num_drafts: int, max_num_seqs: int, max_aux_rows: int) -> RowGroups:
    """Return the groups of the merged pass for batches of 1, 2, 4, 8, ... from the head's measured acceptance.

    Args:
        head, num_drafts: config of the head, and K.
        max_num_seqs, max_aux_rows: the largest batch, and the maximum of its auxiliary rows.
    """
    rows = {batch: max_aux_rows // batch for batch in _doubled(max_num_seqs)}
    p, last = UNMEASURED_ACCEPTANCE, head.window - 1
    accepted = head.accepted or [*((1 - p) * p**g for g in range(last)), p**last]  # of independent drafts
    tables = {budget: choose_groups(accepted, num_drafts, budget, head.variant) for budget in set(rows.values())}
    drafted = {batch: tables[budget] for batch, budget in rows.items() if tables[budget].expected_tokens > 1}
    return RowGroups(_merged([Bucket(batch, table.sizes) for batch, table in drafted.items()]), leading=0)


def scheduled_groups(groups_of: Callable[[int], RowGroups], drafts_by_batch: Sequence[int]) -> RowGroups:
    """Return the groups of a schedule from those of K drafts, `groups_of`.

    drafts_by_batch: K of batch size n at index n - 1.
    """
    found = {drafts: groups_of(drafts) for drafts in set(drafts_by_batch) if drafts}
    width = 1 + max(found, default=0)
    buckets: list[Bucket] = []
    for batch, drafts in enumerate(drafts_by_batch, start=1):
        bucket = found[drafts].bucket(batch) if drafts else None
        sizes = bucket.sizes if bucket else ()
        # a step may still verify the drafts of a smaller batch: groups of more than its own K exist, without rows
        buckets.append(Bucket(batch, sizes + (0,) * (width - len(sizes))))
    return next(iter(found.values()), RowGroups((), leading=0))._replace(buckets=_merged(buckets))


def most_drafts(bucket: Bucket | None, variant: str, leading: int) -> int:
    """Return the most drafts of a group of a bucket; 0 without one."""
    return max(0, max(bucket.sizes) + leading - VARIANTS[variant]) if bucket else 0


def drafts_of_rows(rows: Any, variant: str) -> Any:
    """Return the drafts of groups with `rows` rows in the merged pass (arrays or tensors of integers)."""
    return (rows - VARIANTS[variant]).clip(min=0)


def choose_groups(accepted: Sequence[float], num_drafts: int, budget: int, variant: str) -> GroupTable:
    """Return the table of groups of one request with the most tokens per step.

    Args:
        accepted: P(exactly g drafts are right), g = 0, 1, ...; missing ones are 0.
        num_drafts: K.
        budget: the most rows.
        variant: "o-ptp", "c-ptp", "late" or "independent".
    """
    chain = _Chain(accepted, num_drafts, budget, variant)
    if budget >= (num_drafts + 1) * chain.most:
        return chain.table(np.full(num_drafts + 1, chain.most))
    tables = [chain.table(chain.improved(start)) for start in chain.starts()]
    return max(tables, key=lambda table: table.expected_tokens)


def _doubled(most: int) -> list[int]:
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def _merged(buckets: list[Bucket]) -> tuple[Bucket, ...]:
    return tuple(list(same)[-1] for _, same in groupby(buckets, key=lambda bucket: bucket.sizes))


class _Chain:
    """The steps of one request, and the search for a table of sizes [K + 1] of at most `budget` rows."""

    def __init__(self, accepted: Sequence[float], num_drafts: int, budget: int, variant: str) -> None:
        chances = np.asarray(accepted, float)
        self.drafts, self.budget, self.variant = num_drafts, budget, variant
        self.most = num_drafts + VARIANTS[variant]  # rows of a group that are of use
        cumulative = np.zeros(max(num_drafts + 1, len(chances)))
        cumulative[: len(chances)] = chances[::-1].cumsum()[::-1] / chances.sum()
        cumulative = np.minimum.accumulate(cumulative[: num_drafts + 1])  # S_0 = 1, ..., S_K
        self.tokens = cumulative.cumsum()  # [K + 1] of a step with v drafts
        v, d = np.ogrid[: num_drafts + 1, : num_drafts + 1]
        below = np.append(cumulative[1:], 0)
        chance_of_d = np.where(d < v, cumulative - below, np.where(d == v, cumulative, 0.0))
        self.transition = (1 - RESTART) * chance_of_d  # [v, d]
        self.transition[:, 0] += RESTART

    def stationary(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens per step [...] and the distribution of d [..., K + 1] of tables sizes[..., K + 1]."""
        drafts = drafts_of_rows(sizes, self.variant)
        step = self.transition[drafts]  # [..., d, next d]
        system = np.eye(step.shape[-1]) - step + 1
        visits = np.linalg.solve(system.swapaxes(-1, -2), np.ones((*step.shape[:-1], 1)))[..., 0]
        return (visits * self.tokens[drafts]).sum(-1), visits

    def table(self, sizes: np.ndarray) -> GroupTable:
        sizes = np.where(sizes > VARIANTS[self.variant], sizes, 0)
        return GroupTable(tuple(sizes.tolist()), float(self.stationary(sizes)[0]))

    def starts(self) -> Iterator[np.ndarray]:
        """Yield start tables: the likeliest groups after steps of several lengths, and random ones."""
        for length in np.unique(np.geomspace(1, self.drafts, MAX_STARTS).round().astype(int)):
            sizes, left = np.zeros(self.drafts + 1, dtype=int), self.budget
            for d in self.transition[length].argsort()[::-1]:
                sizes[d] = min(length + VARIANTS[self.variant], left)
                left -= sizes[d]
            yield sizes
        random = np.random.default_rng(0)
        for _ in range(MAX_STARTS):
            shares = random.dirichlet(np.full(self.drafts + 1, 0.5))
            yield np.minimum(random.multinomial(self.budget, shares), self.most)

    def improved(self, sizes: np.ndarray) -> np.ndarray:
        for _ in range(MAX_ROUNDS):
            better = self.exchanged(sizes)
            if self.stationary(better)[0] <= self.stationary(sizes)[0] + 1e-12:
                break
            sizes = better
        return sizes

    def exchanged(self, sizes: np.ndarray) -> np.ndarray:
        """Return the best table in which one group gives rows to another."""
        tokens, visits = self.stationary(sizes)
        drafts = drafts_of_rows(sizes, self.variant)
        step = self.transition[drafts]
        ahead = np.linalg.solve(np.eye(len(step)) - step + visits, self.tokens[drafts] - tokens)  # [d]
        values = self.tokens + self.transition @ ahead  # w of the module, [v]
        worth = visits[:, None] * values[drafts_of_rows(np.arange(self.most + 1), self.variant)]  # [d, rows]
        giver, taker, left = np.meshgrid(*map(np.arange, (len(sizes), len(sizes), self.most)), indexing="ij")
        possible = (giver != taker) & (left < sizes[giver]) & (sizes[taker] < self.most)
        giver, taker, left = giver[possible], taker[possible], left[possible]
        if not len(giver):
            return sizes
        received = np.minimum(sizes[taker] + sizes[giver] - left + self.budget - sizes.sum(), self.most)
        promise = worth[giver, left] + worth[taker, received] - worth[giver, sizes[giver]] - worth[taker, sizes[taker]]
        best = promise.argsort()[::-1][:MAX_EXCHANGES]
        tables = np.repeat(sizes[None], len(best), 0)
        tables[range(len(best)), giver[best]] = left[best]
        tables[range(len(best)), taker[best]] = received[best]
        return tables[self.stationary(tables)[0].argmax()]
