"""Sizes of the groups of auxiliary rows that a merged pass of a PTP head carries.

A merged pass verifies v drafts and drafts the next step's at once: before it is known how many drafts are accepted, a
group of n_d rows stands ready for each number d. The steps of a request are a Markov chain whose state is v, the drafts
of the step:

    P(d accepted | v) = S_d - S_(d+1) for d < v, S_v for d = v;   next v = drafts(n_d)
    drafts(n) = n - 1 (o-ptp: row 0 only tells the others which token comes first) or n (c-ptp), at most K

with S_g = P(at least g leading drafts are right), measured. A table maximises the tokens per step of the chain's
stationary distribution over all n with sum n_d <= B. By the performance difference lemma a change of n_d is worth, to
first order, pi_d w(drafts(n_d)): pi the stationary distribution of d, w(v) the value of starting a step with v drafts.
So a table is found by policy iteration: values of the present one, best allocation for them (a knapsack, solved
exactly), again; then by exchanges of rows between two groups, each judged by its exact tokens per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from vllm_mtpc.errors import HeadConfigError, ServeConfigError

MAX_ROUNDS = 100
MAX_STARTS = 8  # of either kind
MAX_EXCHANGES = 256  # judged exactly in one round, the most promising ones
RESTART = (
    1e-9  # chance that a request ends: the chain has one stationary distribution, that of requests that start anew
)
VARIANTS = {"o-ptp": 1, "c-ptp": 0}  # rows of a group that draft nothing


class GroupTable(NamedTuple):
    """``sizes[d]``: rows of the group for d accepted drafts, d = 0..K; ``expected_tokens``: per step, stationary."""

    sizes: tuple[int, ...]
    expected_tokens: float


def choose_groups(accepted: Sequence[float], num_drafts: int, budget: int, variant: str, window: int) -> GroupTable:
    """Rows of each group of one request, at most ``budget`` in all.

    ``accepted``: P(exactly g drafts are right), g = 0, 1, ... (drafts beyond its end never are); ``num_drafts``: K.
    Raises HeadConfigError or ServeConfigError where a value is not possible.
    """
    chain = _Chain(accepted, num_drafts, variant, window)
    if budget < 0:
        raise ServeConfigError(f"budget={budget} auxiliary rows per request: allowed are 0 and above; raise it")
    if budget >= chain.full_budget:
        return chain.table(np.full(num_drafts + 1, chain.most))
    found = {tuple(_improve(_reallocated, chain, start, budget)) for start in _starts(chain, budget)}
    tables = [chain.table(_improve(_exchanged, chain, np.array(sizes), budget)) for sizes in sorted(found)]
    return max(tables, key=lambda table: table.expected_tokens)


def tables_by_batch(
    accepted: Sequence[float],
    num_drafts: int,
    variant: str,
    window: int,
    max_num_seqs: int,
    max_rows: int,
    budget: int | None = None,
) -> list[tuple[int, GroupTable]]:
    """(largest batch, table) for batches of up to 1, 2, 4, 8, ... and ``max_num_seqs`` requests.

    A request has ``budget`` rows (None: as many as can be of use), in large batches fewer: ``max_rows`` are all there
    are. A table without rows: batches of this size are not drafted for.
    """
    full = _Chain(accepted, num_drafts, variant, window).full_budget
    if max_num_seqs < 1 or max_rows < 0:
        raise ServeConfigError(
            f"max_num_seqs={max_num_seqs}, max_rows={max_rows}: allowed are 1 and above, 0 and above; raise them"
        )
    each = full if budget is None else min(full, budget)
    batches = doubled(max_num_seqs)
    rows = [min(each, max_rows // batch) for batch in batches]
    tables = {share: choose_groups(accepted, num_drafts, share, variant, window) for share in set(rows)}
    return [(batch, tables[share]) for batch, share in zip(batches, rows, strict=True)]


def doubled(most: int) -> list[int]:
    """1, 2, 4, 8, ... and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def drafts_of_rows(rows: Any, variant: str) -> Any:
    """Drafts of groups of so many rows (arrays or tensors of integers)."""
    return (rows - VARIANTS[variant]).clip(min=0)


class _Values(NamedTuple):
    tokens: float  # per step, the target's own token included
    visits: np.ndarray  # [K + 1] stationary distribution of d
    worth: np.ndarray  # [K + 1] by v: tokens of a step with v drafts and, relative to the mean, of all behind it


class _Chain:
    """The steps of one request, whatever the table."""

    def __init__(self, accepted: Sequence[float], num_drafts: int, variant: str, window: int) -> None:
        if variant not in VARIANTS:
            raise HeadConfigError(f"variant {variant!r}: allowed are {', '.join(VARIANTS)}; set variant to one")
        if not 1 <= num_drafts <= window - 1:
            raise ServeConfigError(
                f"num_drafts={num_drafts} with window={window}: allowed are 1 to {window - 1}; set num_drafts to that"
            )
        chances = np.asarray(accepted, float)
        if (
            chances.ndim != 1
            or not len(chances)
            or not np.isfinite(chances).all()
            or (chances < 0).any()
            or chances.sum() <= 0
        ):
            raise HeadConfigError(
                "accepted: not a distribution over the numbers of accepted drafts; measure the head again"
            )
        self.drafts, self.lead = num_drafts, VARIANTS[variant]
        self.most = num_drafts + self.lead  # rows of a group that are of use
        self.full_budget = (num_drafts + 1) * self.most
        survival = np.zeros(max(num_drafts + 1, len(chances)))
        survival[: len(chances)] = chances[::-1].cumsum()[::-1] / chances.sum()
        self.survival = np.minimum.accumulate(survival[: num_drafts + 1])  # S_0 = 1, ..., S_K
        self.tokens = self.survival.cumsum()  # [K + 1] of a step with v drafts
        v, d = np.ogrid[: num_drafts + 1, : num_drafts + 1]
        below = np.append(self.survival[1:], 0)
        chance_of_d = np.where(d < v, self.survival - below, np.where(d == v, self.survival, 0.0))
        self.transition = (1 - RESTART) * chance_of_d  # [v, d]
        self.transition[:, 0] += RESTART

    def drafts_of(self, sizes: np.ndarray) -> np.ndarray:
        return (sizes - self.lead).clip(min=0)

    def stationary(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens per step [...] and distribution of d [..., K + 1] of tables sizes[..., K + 1]."""
        drafts = self.drafts_of(sizes)
        step = self.transition[drafts]  # [..., d, next d]
        system = np.eye(step.shape[-1]) - step + 1
        visits = np.linalg.solve(system.swapaxes(-1, -2), np.ones((*step.shape[:-1], 1)))[..., 0]
        return (visits * self.tokens[drafts]).sum(-1), visits

    def values(self, sizes: np.ndarray) -> _Values:
        tokens, visits = self.stationary(sizes)
        drafts = self.drafts_of(sizes)
        step = self.transition[drafts]
        ahead = np.linalg.solve(np.eye(len(step)) - step + visits, self.tokens[drafts] - tokens)  # [d]
        return _Values(float(tokens), visits, self.tokens + self.transition @ ahead)

    def table(self, sizes: np.ndarray) -> GroupTable:
        sizes = np.where(sizes > self.lead, sizes, 0)
        return GroupTable(tuple(sizes.tolist()), float(self.stationary(sizes)[0]))


_Step = Callable[[_Chain, np.ndarray, int], np.ndarray]


def _starts(chain: _Chain, budget: int) -> Iterator[np.ndarray]:
    """Tables to improve on: what chains of steps of several lengths need most often, and tables drawn at random."""
    lengths = np.unique(np.geomspace(1, chain.drafts, MAX_STARTS).round().astype(int))
    for length in lengths:
        yield _allocate(chain, budget, chain.transition[length], chain.tokens, length + chain.lead)
    random = np.random.default_rng(0)
    for _ in range(MAX_STARTS):
        visits = random.dirichlet(np.full(chain.drafts + 1, 0.5))
        yield _allocate(chain, budget, visits, chain.tokens)


def _improve(step: _Step, chain: _Chain, sizes: np.ndarray, budget: int) -> np.ndarray:
    """Applies ``step`` as long as tokens per step rise."""
    tokens = chain.stationary(sizes)[0]
    for _ in range(MAX_ROUNDS):
        better = step(chain, sizes, budget)
        gained = chain.stationary(better)[0]
        if gained <= tokens + 1e-12:
            break
        sizes, tokens = better, gained
    return sizes


def _reallocated(chain: _Chain, sizes: np.ndarray, budget: int) -> np.ndarray:
    values = chain.values(sizes)
    return _allocate(chain, budget, values.visits, values.worth)


def _allocate(chain: _Chain, budget: int, visits: np.ndarray, worth: np.ndarray, most: int | None = None) -> np.ndarray:
    """The table with the largest sum of visits[d] worth[drafts(n_d)], n_d <= ``most``: a knapsack, solved exactly."""
    most = chain.most if most is None else most
    gain = worth[chain.drafts_of(np.arange(most + 1))]  # by rows
    padded = np.full(most + budget + 1, -np.inf)
    padded[most:] = 0.0  # best sum of the groups so far, by rows they may have; nothing below 0 rows
    window = np.arange(budget + 1)[:, None] + np.arange(most, -1, -1)  # [B + 1, rows of this group]
    choices = []
    for share in visits:
        sums = padded[window] + share * gain
        choices.append(sums.argmax(1))
        padded[most:] = sums.max(1)
    sizes, left = [], budget
    for choice in reversed(choices):
        sizes.append(int(choice[left]))
        left -= sizes[-1]
    return np.array(sizes[::-1])


def _exchanged(chain: _Chain, sizes: np.ndarray, budget: int) -> np.ndarray:
    """The best table in which one group has fewer rows and another one those that became free."""
    values = chain.values(sizes)
    worth = values.visits[:, None] * values.worth[chain.drafts_of(np.arange(chain.most + 1))]  # [d, rows]
    giver, taker, left = np.meshgrid(*map(np.arange, (len(sizes), len(sizes), chain.most)), indexing="ij")
    possible = (giver != taker) & (left < sizes[giver]) & (sizes[taker] < chain.most)
    giver, taker, left = giver[possible], taker[possible], left[possible]
    if not len(giver):
        return sizes
    given = np.minimum(sizes[taker] + sizes[giver] - left + budget - sizes.sum(), chain.most)
    promise = worth[giver, left] + worth[taker, given] - worth[giver, sizes[giver]] - worth[taker, sizes[taker]]
    best = promise.argsort()[::-1][:MAX_EXCHANGES]
    tables = np.repeat(sizes[None], len(best), 0)
    tables[range(len(best)), giver[best]] = left[best]
    tables[range(len(best)), taker[best]] = given[best]
    return tables[chain.stationary(tables)[0].argmax()]
