"""The number of drafts that Model Runner V1 makes and verifies, from measured acceptance and measured costs.

Before drafting, the planner chooses the K with the most expected tokens per second of the batch: `Acceptance` estimates
accepted drafts, `Costs` the seconds of steps and drafts. With K = 0 the head is not run. After drafting, a draft is
pruned if its cumulative acceptance is less than (seconds of its row) x (tokens per second). A small share of the steps
(TRIED) uses another K than the planned one, so that estimates are never final.

The confidence of draft k is max_v q(v) for an argmax and sqrt(sum_v q(v)^2) for a sampled draft. It depends on the
conditional q alone, never on the sampled token: pruning by the token would bias the output of rejection sampling.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_mtpc.plan.draft_schedule import CPU_DRAFT, CPU_STEP

Floats = NDArray[np.float64]
Features = Sequence[float | NDArray[Any]]  # four counts of a step, or of several

GREEDY, SAMPLED = 0, 1  # classes of requests
BIN_EDGES = np.array([0.03, 0.06, 0.12, 0.25, 0.5, 0.7, 0.85, 0.95])  # of confidence
PRIOR_COUNT = 12.0  # weight of the head's card, in observations
ASSUMED = 0.5  # acceptance of a draft that was not measured
DECAY = 0.998  # of all counts per step: half remains after 350 steps
PULL = 0.01  # of each cost weight towards its prior, in steps
SHORTEST_S, LONGEST_S = 1e-5, 10.0  # of a step or a draft; other values come from a clock jump or a stopped process
LEARN_EVERY = 32  # steps of a kind, after its 1st, 2nd, 4th, 8th and 16th
FLOOR = 0.05  # of a prior weight that batches of another kind have measured as 0
VERIFYING = 0.5  # ms of the first number of CPU_DRAFT; the rest is drafting
TRIED = 0.02  # share of the time that trials of another K may lose
LOST = 0.25  # share of its own time that a trial is assumed to lose at least
SOON = 4  # drafted steps of a batch size after which a step without drafts is tried
FEW = 2  # drafts of a trial where the plan has none
MARGIN_ALONE, MARGIN = 1.03, 1.1  # least expected speed-up, for one request and for more (a batch that shrinks costs)


def card_rates(measured: Mapping[str, Sequence[float]], num_drafts: int) -> Floats:
    """Return the acceptance of draft k after accepted drafts, [2, K], from P(the first k accepted) at "t0" and "t1"."""
    rates = np.full((2, num_drafts), ASSUMED)
    for row, key in zip(rates, ("t0", "t1"), strict=True):
        values = measured.get(key) or next(iter(measured.values()), [])
        for k, (before, value) in enumerate(pairwise([1.0, *values[:num_drafts]])):
            row[k] = value / before if before > 0 else ASSUMED
    return rates.clip(0.02, 0.98)


class Acceptance:
    """Estimated acceptance of drafts: rates [2, K] (if all before were accepted) times lifts [2, bins] (by confidence).

    Each is a ratio of decayed counts, accepted / expected, with PRIOR_COUNT observations of the card's rates and of
    lift 1. Drafts that were not verified, or follow the first rejected one, are not counted.
    """

    def __init__(self, rates: Floats) -> None:
        self.rates, self.lifts = rates.copy(), np.ones((2, len(BIN_EDGES) + 1))
        self._card = rates
        self._rate_counts = np.zeros((2, *rates.shape))  # (accepted, expected at rate 1), class, position
        self._lift_counts = np.zeros((2, *self.lifts.shape))  # (accepted, expected at lift 1), class, bin

    def cumulative(self, confidence: Floats, kind: NDArray[np.int64]) -> Floats:
        """Return P(the first k drafts are all accepted), [B, K], from confidence [B, K] and kind [B]."""
        lifts = self.lifts[kind[:, None], np.searchsorted(BIN_EDGES, confidence)]
        chances = self.rates[kind, : confidence.shape[1]] * lifts
        return np.minimum(chances, 0.995).cumprod(axis=1)

    def observe(
        self, kind: NDArray[np.int64], confidence: Floats, verified: NDArray[np.int64], accepted: NDArray[np.int64]
    ) -> None:
        """Count one step: of verified [B] drafts with confidence [B, K], accepted [B] were accepted."""
        was_tested = np.arange(confidence.shape[1]) < np.minimum(verified, accepted + 1)[:, None]  # [B, K]
        rows, columns = np.nonzero(was_tested)
        if not len(rows):
            return
        hits = (columns < accepted[rows]).astype(np.float64)
        kinds, bins = kind[rows], np.searchsorted(BIN_EDGES, confidence[rows, columns])
        rates, lifts = self.rates[kinds, columns], self.lifts[kinds, bins]
        for counts, index, expected in ((self._rate_counts, columns, lifts), (self._lift_counts, bins, rates)):
            counts *= DECAY
            np.add.at(counts[0], (kinds, index), hits)
            np.add.at(counts[1], (kinds, index), expected)
        rates = (self._rate_counts[0] + PRIOR_COUNT * self._card) / (self._rate_counts[1] + PRIOR_COUNT)
        prior = PRIOR_COUNT * ASSUMED
        self.rates, self.lifts = rates.clip(0.02, 0.98), (self._lift_counts[0] + prior) / (self._lift_counts[1] + prior)


class Confidence:
    """Confidence of each draft of a batch, [max_num_reqs, K], written while it is drafted."""

    def __init__(self, max_num_reqs: int, num_drafts: int) -> None:
        self.values = torch.ones(max_num_reqs, num_drafts)

    def record_argmax(self, k: int, log_q: Tensor) -> None:
        torch.exp(log_q.amax(dim=-1), out=self.values[: len(log_q), k])

    def record_sample(self, k: int, probs: Tensor, is_greedy: Tensor) -> None:
        """Record draft k, sampled from probs [B, V] or, where is_greedy [B], its argmax."""
        chance = torch.where(is_greedy, probs.amax(dim=-1), torch.linalg.vector_norm(probs, dim=-1))
        self.values[: len(probs), k] = chance

    def read(self, num_reqs: int, num_drafts: int) -> Floats:
        return self.values[:num_reqs, :num_drafts].double().numpy(force=True)


class LinearCost:
    """Seconds = weights . features, by least squares of relative errors with a pull towards `prior`'s proportions."""

    def __init__(self, prior: Floats) -> None:
        self.prior = self.weights = prior
        self._products = np.zeros((2, len(prior), len(prior)))  # of steps without drafts, with drafts
        self._sums = np.zeros((2, len(prior)))
        self._fit, self._square = 0.0, 0.0  # sums of expected / seconds and of its square
        self.counts = [0, 0]  # observations, by the same two kinds

    def __call__(self, features: Features) -> Floats:
        return sum(weight * feature for weight, feature in zip(self.weights, features, strict=True))

    def observe(self, features: Features, seconds: float) -> bool:
        """Add a step; return whether `learn` is due. The answer depends on counts alone: ranks learn together."""
        kind = int(features[-1] > 0)  # decays by itself: a rare kind is not forgotten because of a frequent one
        self.counts[kind] += 1
        if kind and self.counts[kind] == 1:
            return False  # the first draft includes one-time costs
        if not SHORTEST_S <= seconds <= LONGEST_S:
            seconds = math.inf  # has no weight
        x, count = np.array(features, dtype=np.float64) / seconds, self.counts[kind]
        expected = float(self.prior @ x)
        self._fit = DECAY * self._fit + expected
        self._square = DECAY * self._square + expected * expected
        self._products[kind] = DECAY * self._products[kind] + x[:, None] * x
        self._sums[kind] = DECAY * self._sums[kind] + x
        return count & (count - 1) == 0 or count % LEARN_EVERY == 0

    @property
    def is_known(self) -> bool:
        plain, drafted = self.counts
        return plain > 0 or drafted > 1

    def scale(self, default: float = 1.0) -> float:
        return self._fit / self._square if self._square > 0 else default

    def learn(self, default_scale: float = 1.0) -> None:
        """Fit non-negative weights to all observations."""
        prior = self.prior * self.scale(default_scale)
        products = self._products.sum(axis=0) + np.diag(PULL / prior**2)
        sums = self._sums.sum(axis=0) + PULL / prior
        used, self.weights = np.ones(len(prior), dtype=bool), np.zeros(len(prior))
        while used.any():  # a negative weight becomes 0, and the others are fitted without it
            found = np.linalg.solve(products[np.ix_(used, used)], sums[used])
            if (found >= 0).all():
                self.weights[used] = found
                break
            used[np.flatnonzero(used)[found < 0]] = False


def step_features(batch: int, rows: int | NDArray[Any], is_verifying: bool | NDArray[Any]) -> Features:
    return 1.0, batch, rows, is_verifying


def draft_features(batch: int, drafts: int | NDArray[Any]) -> Features:
    return 1.0, batch, drafts, batch * drafts


class Plan(NamedTuple):
    drafts: int  # of each request
    threshold: float  # cumulative acceptance below which a draft is pruned
    seconds: float = 0.0  # of a step with its draft
    trials: tuple[tuple[int, float], ...] = ()  # other numbers of drafts, and the seconds each is expected to lose


class Costs:
    """Seconds of a step of the target and of a draft, for batches of similar size that are all greedy or not.

    The first weights have the proportions of CPU_STEP and CPU_DRAFT, or those of `like`; load: see `relative_load`.
    """

    def __init__(self, load: float, like: Costs | None = None) -> None:
        drafting, draft_request, per_draft, per_token = CPU_DRAFT
        draft = drafting - VERIFYING, draft_request, per_draft, max(per_token, load * CPU_STEP[2])
        priors = 1e-3 * np.array([(*CPU_STEP, VERIFYING), draft])
        if like is not None:
            found = like.weights()
            scale = (found.sum(axis=1) / priors.sum(axis=1))[:, None]
            priors = np.maximum(found, FLOOR * scale * priors)
        self.steps, self.drafts = map(LinearCost, priors)
        self._saved = defaultdict[int, float](float)  # seconds that a trial may lose, by its number of drafts

    def step(self, batch: int, rows: int | NDArray[Any], is_verifying: bool | NDArray[Any]) -> Floats:
        return self.steps(step_features(batch, rows, is_verifying))

    def draft(self, batch: int, drafts: int | NDArray[Any]) -> Floats:
        return np.where(np.greater(drafts, 0), self.drafts(draft_features(batch, drafts)), 0.0)

    def weights(self) -> Floats:
        return np.stack([self.steps.weights, self.drafts.weights])  # [2, 4]

    def learn(self, share: Callable[[Floats], Floats]) -> None:
        """Fit both costs; drafts that were not observed are scaled as steps are. share: broadcasts rank 0's."""
        self.steps.learn()
        self.drafts.learn(self.steps.scale())
        self.steps.weights, self.drafts.weights = share(self.weights())

    def next_trial(self, plan: Plan) -> int | None:
        plain, drafted = self.steps.counts
        if plan.drafts and not plain and drafted >= SOON:
            return 0
        for drafts, lost in plan.trials:
            self._saved[drafts] += TRIED / len(plan.trials) * plan.seconds
            if self._saved[drafts] >= lost:
                self._saved[drafts] = 0.0
                return drafts
        return None


class Drafted(NamedTuple):
    kind: NDArray[np.int64]  # [B]
    confidence: Floats  # [B, K]
    kept: list[int]  # drafts of each that the scheduler received


class DraftPlanner:
    """Plans the drafts of one server.

    Args:
        rates, load: [2, K], acceptance by the head's card; see `Costs`.
        min_acceptance: least cumulative acceptance of a draft; all K are made. None: plan by costs.
        share: broadcasts rank 0's costs; all ranks must plan alike.
    """

    def __init__(
        self,
        rates: Floats,
        load: float,
        min_acceptance: float | None = None,
        share: Callable[[Floats], Floats] = lambda weights: weights,
    ) -> None:
        self.acceptance, self.min_acceptance = Acceptance(rates), min_acceptance
        self._load, self._costs = load, dict[tuple[int, bool], Costs]()
        self._share, self._is_sampled = share, False
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self._drafted: Drafted | None = None  # of the last step
        self._batch: tuple[str, ...] = ()
        self._end_time = 0.0

    def plan(self, num_greedy: int, num_sampled: int, most: int) -> tuple[int, float]:
        """Return (drafts of each request, threshold of cumulative acceptance) for a batch; most: allowed drafts."""
        if self.min_acceptance is not None or most == 0:
            return most, self.min_acceptance or 0.0
        key = num_greedy, num_sampled, most
        self._is_sampled = num_sampled > 0
        if key not in self._plans:
            self._plans[key] = self._find_best(*key)
        plan = self._plans[key]
        trial = self._costs_for(num_greedy + num_sampled, self._is_sampled).next_trial(plan)
        return (plan.drafts, plan.threshold) if trial is None else (trial, 0.0)

    def lengths(self, confidence: Floats, kind: NDArray[np.int64], threshold: float) -> list[int]:
        """Return the number of leading drafts to verify of each request, from confidence [B, K] and kind [B]."""
        if threshold <= 0:
            return [confidence.shape[1]] * len(confidence)
        return (self.acceptance.cumulative(confidence, kind) >= threshold).sum(axis=1).tolist()

    def replace_head(self, rates: Floats, load: float) -> None:
        if load != self._load:
            self._load, self._costs = load, {}
        self.acceptance, self._drafted = Acceptance(rates), None
        self._plans.clear()

    def begin_step(
        self, names: Sequence[str], verified: Sequence[int], emitted: Sequence[int], is_plain_decoding: bool
    ) -> int:
        """Learn from the step that the target has just finished; return the drafts that the scheduler has pruned.

        names, verified, emitted: requests, their verified drafts and emitted tokens; 0 for an unfinished prompt.
        is_plain_decoding: whether the step read no prompt.
        """
        now, batch = time.perf_counter(), tuple(names)
        pruned = self._observe(batch, verified, emitted)
        if self.min_acceptance is None and is_plain_decoding and batch == self._batch:
            features = step_features(len(batch), len(batch) + sum(verified), any(verified))
            costs = self._costs_for(len(batch), self._is_sampled)
            if costs.steps.observe(features, now - self._end_time):
                self._learn(costs)
        return pruned

    def end_step(self, names: Sequence[str], drafted: Drafted | None, seconds: float) -> None:
        if drafted is not None and self.min_acceptance is None:
            batch, drafts = drafted.confidence.shape
            self._costs_for(batch, self._is_sampled).drafts.observe(draft_features(batch, drafts), seconds)
        self._drafted, self._batch, self._end_time = drafted, tuple(names), time.perf_counter()

    def _costs_for(self, batch: int, is_sampled: bool) -> Costs:
        key = batch.bit_length(), is_sampled
        if key not in self._costs:
            known = {other: one for other, one in self._costs.items() if one.steps.is_known}
            like = min(known, key=lambda other: (other[1] != is_sampled, abs(other[0] - key[0])), default=key)
            self._costs[key] = Costs(self._load, known.get(like))
        return self._costs[key]

    def _find_best(self, num_greedy: int, num_sampled: int, most: int) -> Plan:
        batch, drafts = num_greedy + num_sampled, np.arange(most + 1)
        costs = self._costs_for(batch, num_sampled > 0)
        accepted = self.acceptance.rates[:, :most].cumprod(axis=1).cumsum(axis=1)  # [2, K]
        tokens = batch + np.concatenate([[0.0], np.array([num_greedy, num_sampled]) @ accepted])
        seconds = costs.step(batch, batch * (1 + drafts), drafts > 0) + costs.draft(batch, drafts)
        speed = tokens / seconds
        best = int(speed.argmax())
        best = best if speed[best] >= (MARGIN_ALONE if batch == 1 else MARGIN) * speed[0] else 0
        lost = np.maximum(seconds - tokens / speed[best], LOST * seconds)
        others = [min(FEW, most)] if best == 0 else sorted({0, most} - {best})
        row = costs.steps.weights[2]  # seconds of one more row of the target
        trials = tuple((other, float(lost[other])) for other in others)
        return Plan(best, float(row * speed[best]), float(seconds[best]), trials)

    def _observe(self, names: Sequence[str], verified: Sequence[int], emitted: Sequence[int]) -> int:
        last, rows = self._drafted, {name: row for row, name in enumerate(self._batch)}
        pairs = [(i, rows[name]) for i, name in enumerate(names) if emitted[i] and name in rows]
        if last is None or not pairs:
            return 0
        now, before = np.array(pairs).T
        tested, accepted = np.array(verified)[now], np.array(emitted)[now] - 1
        if self.min_acceptance != 0:
            self.acceptance.observe(last.kind[before], last.confidence[before], tested, accepted)
        return int(sum(last.kept[row] for row in before) - tested.sum())

    def _learn(self, costs: Costs) -> None:
        costs.learn(self._share)
        self._plans.clear()
