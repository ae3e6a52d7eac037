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

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

MAX_ROUNDS = 100
MAX_STARTS = 8  # of each of the two kinds of start
MAX_EXCHANGES = 256  # evaluated exactly per round
# Chance that a request ends and another starts, which makes the stationary distribution unique
RESTART = 1e-9
UNMEASURED_ACCEPTANCE = 0.7  # acceptance of a further draft, for a head that was not measured


class RowGroups(NamedTuple):
    """Groups of a request by batch size."""

    sizes: tuple[tuple[int, ...], ...]  # of batch size n at index n - 1: rows of the group for d accepted drafts
    leading: int  # rows of real tokens at the start of each group (two passes: 1, merged: 0)

    @property
    def max_groups(self) -> int:
        """The most groups of a batch."""
        return max(batch * sum(map(bool, sizes)) for batch, sizes in enumerate(self.sizes, start=1))

    @property
    def max_group_rows(self) -> int:
        """Rows of the longest group, the leading one included."""
        return max(map(max, self.sizes)) + self.leading

    @property
    def max_rows(self) -> int:
        """The most rows of a batch, leading ones included."""
        drafting = ((batch, sum(sizes)) for batch, sizes in enumerate(self.sizes, start=1) if any(sizes))
        return max((batch * (rows + self.leading) for batch, rows in drafting), default=0)

    def blocks_per_group(self, block_size: int) -> int:
        """Return the KV blocks of a group, which may start anywhere in its first block."""
        return -(-(block_size - 1 + self.max_group_rows) // block_size)

    def num_blocks(self, block_size: int) -> int:
        """Return the KV blocks of all groups."""
        return self.max_groups * self.blocks_per_group(block_size)


def plan_groups(head: Any, drafts_by_batch: Sequence[int], two_pass: bool, max_aux_rows: int) -> RowGroups:
    """Return the groups of each batch size: those of the next power of two, within `max_aux_rows` for the batch.

    head is a PtpConfig: the merged pass has the groups with the most tokens per step by its measured acceptance. With
    two passes each request has one group. K of batch size n is at index n - 1 of drafts_by_batch.
    """
    leading, first_row = int(two_pass), head.first_row
    p, last = UNMEASURED_ACCEPTANCE, head.window - 1
    accepted = head.accepted or [*((1 - p) * p**g for g in range(last)), p**last]  # of independent drafts

    @cache
    def sizes_of(num_drafts: int, budget: int) -> tuple[int, ...]:
        if two_pass:  # the leading row gives a draft, too
            return (min(max(1, num_drafts - 1 + first_row), max(0, budget)),)
        sizes, tokens_per_step = Chain(accepted, num_drafts, budget, first_row).best()
        return sizes if tokens_per_step > 1 else ()

    by_batch, width = [], 1 + max(drafts_by_batch)
    for batch, num_drafts in enumerate(drafts_by_batch, start=1):
        largest = min(1 << (batch - 1).bit_length(), len(drafts_by_batch))
        sizes = sizes_of(num_drafts, max_aux_rows // largest - leading) if num_drafts else ()
        # a step may still verify the drafts of a smaller batch: groups of more than its own K exist, without rows
        by_batch.append(sizes + (0,) * (width - len(sizes)))
    return RowGroups(tuple(by_batch), leading)


class Chain:
    """The steps of one request, and the search for a table of sizes [K + 1] of at most `budget` rows.

    accepted: P(exactly g drafts are right), g = 0, 1, ...; missing ones are 0. first_row: rows of a group without a
    draft.
    """

    def __init__(self, accepted: Sequence[float], num_drafts: int, budget: int, first_row: int) -> None:
        chances = np.asarray(accepted, float)
        self.num_drafts, self.budget, self.first_row = num_drafts, budget, first_row
        self.most = num_drafts + first_row  # rows of a group that are of use
        cumulative = np.zeros(max(num_drafts + 1, len(chances)))
        cumulative[: len(chances)] = chances[::-1].cumsum()[::-1] / chances.sum()
        cumulative = np.minimum.accumulate(cumulative[: num_drafts + 1])  # S_0 = 1, ..., S_K
        self.tokens = cumulative.cumsum()  # [K + 1] of a step with v drafts
        v, d = np.ogrid[: num_drafts + 1, : num_drafts + 1]
        below = np.append(cumulative[1:], 0)
        chance_of_d = np.where(d < v, cumulative - below, np.where(d == v, cumulative, 0.0))
        self.transition = (1 - RESTART) * chance_of_d  # [v, d]
        self.transition[:, 0] += RESTART

    def drafts(self, rows: np.ndarray) -> np.ndarray:
        """Return the drafts of groups with `rows` rows."""
        return (rows - self.first_row).clip(min=0)

    def stationary(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens per step [...] and the distribution of d [..., K + 1] of tables sizes[..., K + 1]."""
        drafts = self.drafts(sizes)
        step = self.transition[drafts]  # [..., d, next d]
        system = np.eye(step.shape[-1]) - step + 1
        visits = np.linalg.solve(system.swapaxes(-1, -2), np.ones((*step.shape[:-1], 1)))[..., 0]
        return (visits * self.tokens[drafts]).sum(-1), visits

    def tokens_per_step(self, sizes: np.ndarray) -> float:
        """Return the tokens per step of a table sizes [K + 1]."""
        return float(self.stationary(sizes)[0])

    def best(self) -> tuple[tuple[int, ...], float]:
        """Return the table with the most tokens per step, and that number."""
        if self.budget >= (self.num_drafts + 1) * self.most:
            tables = [np.full(self.num_drafts + 1, self.most)]
        else:
            tables = [self.improved(start) for start in self.starts()]
        tables = [np.where(sizes > self.first_row, sizes, 0) for sizes in tables]  # others draft nothing
        best = max(tables, key=self.tokens_per_step)
        return tuple(best.tolist()), self.tokens_per_step(best)

    def starts(self) -> Iterator[np.ndarray]:
        """Yield start tables: the likeliest groups after steps of several lengths, and random ones."""
        for length in np.unique(np.geomspace(1, self.num_drafts, MAX_STARTS).round().astype(int)):
            sizes, left = np.zeros(self.num_drafts + 1, dtype=int), self.budget
            for d in self.transition[length].argsort()[::-1]:
                sizes[d] = min(length + self.first_row, left)
                left -= sizes[d]
            yield sizes
        random = np.random.default_rng(0)
        for _ in range(MAX_STARTS):
            shares = random.dirichlet(np.full(self.num_drafts + 1, 0.5))
            yield np.minimum(random.multinomial(self.budget, shares), self.most)

    def improved(self, sizes: np.ndarray) -> np.ndarray:
        """Return a table [K + 1] that no exchange improves, from sizes [K + 1]."""
        for _ in range(MAX_ROUNDS):
            better = self.exchanged(sizes)
            if self.tokens_per_step(better) <= self.tokens_per_step(sizes) + 1e-12:
                break
            sizes = better
        return sizes

    def exchanged(self, sizes: np.ndarray) -> np.ndarray:
        """Return the best table in which one group gives rows to another."""
        tokens, visits = self.stationary(sizes)
        drafts = self.drafts(sizes)
        step = self.transition[drafts]
        ahead = np.linalg.solve(np.eye(len(step)) - step + visits, self.tokens[drafts] - tokens)  # [d]
        values = self.tokens + self.transition @ ahead  # w of the module, [v]
        worth = visits[:, None] * values[self.drafts(np.arange(self.most + 1))]  # [d, rows]
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
