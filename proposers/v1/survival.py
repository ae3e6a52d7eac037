"""How many drafts are made and verified: as many as pay by what is observed.

Before a batch is drafted for, the number K of drafts is chosen that gives the most tokens per second, by the acceptance
that was observed (`Acceptance`) and the seconds that steps and drafts took (`Costs`); with 0 the head is not run.
Behind the head, drafts are cut whose survival is less than the seconds of their row x tokens per second.

The chance of draft k is read off its conditional before the token is drawn: max_v q for an argmax, sqrt(sum_v q(v)^2)
for a draw; what such a confidence is worth is learnt. The cut never looks at draft k: that would keep tokens because of
what they are, and the verifier, which takes them for draws from q, would hand out more of them than the target does.

Batches of about one size, all greedy or not, share what was learnt of costs. So that nothing is believed for ever, a
step now and then does what the plan does not (all drafts, none, or a few), as often as what is believed to be lost by
it stays a small share of the time.
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

from vllm_mtpc.proposers.config.schedule import CPU_DRAFT, CPU_STEP

Floats = NDArray[np.float64]
Features = Sequence[float | NDArray[Any]]  # four counts of a step, or of several

GREEDY, SAMPLED = 0, 1
EDGES = np.array([0.03, 0.06, 0.12, 0.25, 0.5, 0.7, 0.85, 0.95])  # of confidence bins
IMAGINED = 12.0  # observations that the card and "no lift" are worth
ASSUMED = 0.5  # acceptance of a draft that nothing is known of
KEPT = 0.998  # of all counts of acceptance and of what was learnt of a kind of step, per step: half is left after 350

PULL = 0.01  # of each weight towards its prior, in steps
SHORTEST_S, LONGEST_S = 1e-5, 10.0  # of a step or a draft: beyond, the clock has jumped or the process was stopped
LEARN_EVERY = 32  # steps of a kind, behind its 1st, 2nd, 4th, 8th, 16th
FLOOR = 0.05  # of a prior that another kind of batch has found to be nothing
VERIFYING = 0.5  # ms, of the first number of CPU_DRAFT: the rest of it is drafting

TRIED = 0.02  # of the time may be lost by steps that try something else than the plan
LOST = 0.25  # of its time that a try loses at least, whatever is believed
SOON = 4  # drafted steps of a size behind which one without drafts is tried: what others are measured by
FEW = 2  # drafts that are tried where none pay
# Expected gain below which nothing is drafted. Costs are known to 3 %; and requests of a batch that are accepted
# unevenly end one after the other, so that the batch runs out (how much that costs was not measured by itself)
ALONE, MARGIN = 1.03, 1.1


def card_rates(measured: Mapping[str, Sequence[float]], num_drafts: int) -> Floats:
    """[2, K]: chance of draft k given those before it, from P(the first k drafts are all accepted) of the head's card.

    measured: by temperature, "t0" and "t1"; where one is absent the other stands in, and ASSUMED for what nobody
    measured.
    """
    rates = np.full((2, num_drafts), ASSUMED)
    for row, key in zip(rates, ("t0", "t1"), strict=True):
        values = measured.get(key) or next(iter(measured.values()), [])
        for k, (before, value) in enumerate(pairwise([1.0, *values[:num_drafts]])):
            row[k] = value / before if before > 0 else ASSUMED
    return rates.clip(0.02, 0.98)


class Acceptance:
    """How likely drafts of one head on one server are to be accepted: its card at first, then what was observed.

    Two tables of float64, each for greedy and for sampled requests. rates [2, K]: draft k is accepted where all before
    it were. lifts [2, bins]: how much oftener than that when the circuit's confidence falls into a bin. Both are counts
    of what happened over counts of what was expected, begun with a few imagined observations of the card's rates and of
    no lift, and slowly forgotten. Only verified drafts are counted, and those behind the first rejected one tell
    nothing. Nothing here knows a token that is not verified yet: a cut by it leaves the output's distribution alone.
    """

    def __init__(self, rates: Floats) -> None:
        self.rates, self.lifts = rates.copy(), np.ones((2, len(EDGES) + 1))
        self._card = rates
        self._seen = np.zeros((2, *rates.shape))  # (accepted, expected at rate 1), class, position
        self._lifted = np.zeros((2, *self.lifts.shape))  # (accepted, expected at lift 1), class, bin

    def survival_of(self, confidence: Floats, kind: NDArray[np.int64]) -> Floats:
        """[B, K]: P(the first k drafts are all accepted) of requests of class kind [B], with such confidence [B, K]."""
        lifts = self.lifts[kind[:, None], np.searchsorted(EDGES, confidence)]
        chances = self.rates[kind, : confidence.shape[1]] * lifts
        return np.minimum(chances, 0.995).cumprod(axis=1)

    def observe(
        self, kind: NDArray[np.int64], confidence: Floats, verified: NDArray[np.int64], accepted: NDArray[np.int64]
    ) -> None:
        """Count a step: of verified [B] drafts, accepted [B] were, with confidence [B, K] in them."""
        was_tried = np.arange(confidence.shape[1]) < np.minimum(verified, accepted + 1)[:, None]  # [B, K]
        rows, columns = np.nonzero(was_tried)
        if not len(rows):
            return
        hits = (columns < accepted[rows]).astype(np.float64)
        kinds, bins = kind[rows], np.searchsorted(EDGES, confidence[rows, columns])
        rates, lifts = self.rates[kinds, columns], self.lifts[kinds, bins]
        for counts, at, expected in ((self._seen, columns, lifts), (self._lifted, bins, rates)):
            counts *= KEPT
            np.add.at(counts[0], (kinds, at), hits)
            np.add.at(counts[1], (kinds, at), expected)
        rates = (self._seen[0] + IMAGINED * self._card) / (self._seen[1] + IMAGINED)
        self.rates = rates.clip(0.02, 0.98)
        self.lifts = (self._lifted[0] + IMAGINED * ASSUMED) / (self._lifted[1] + IMAGINED * ASSUMED)


class Confidence:
    """The circuit's confidence in each draft of a batch, filled while it drafts."""

    def __init__(self, max_num_reqs: int, num_drafts: int) -> None:
        self.values = torch.ones(max_num_reqs, num_drafts)

    def argmax(self, k: int, log_q: Tensor) -> None:
        """Draft k of every request is the argmax of log_q [B, V]."""
        torch.exp(log_q.amax(dim=-1), out=self.values[: len(log_q), k])

    def drawn(self, k: int, probs: Tensor, is_greedy: Tensor) -> None:
        """Draft k is drawn from probs [B, V], or is its argmax where is_greedy [B]."""
        chance = torch.where(is_greedy, probs.amax(dim=-1), torch.linalg.vector_norm(probs, dim=-1))
        self.values[: len(probs), k] = chance

    def of(self, num_reqs: int, num_drafts: int) -> Floats:
        return self.values[:num_reqs, :num_drafts].double().numpy(force=True)


class Line:
    """Seconds = weights . features, with the proportions of `prior` (weights) where nothing was seen."""

    def __init__(self, prior: Floats) -> None:
        self.prior = self.weights = prior
        self._products = np.zeros((2, len(prior), len(prior)))  # of plain steps, of drafted ones
        self._sums = np.zeros((2, len(prior)))
        self._fit, self._square = 0.0, 0.0  # of what the prior expects, by what it took
        self.counts = [0, 0]  # observed, by the same kinds

    def __call__(self, features: Features) -> Floats:
        return sum(weight * feature for weight, feature in zip(self.weights, features, strict=True))

    def observe(self, features: Features, seconds: float) -> bool:
        """A step that took so long. Errors are relative to it: one that another process delayed weighs little.

        Returns whether it is time to learn: its kind is new, or many were observed.
        """
        kind = int(features[-1] > 0)  # what is seldom seen is not forgotten because of what is seen often
        self.counts[kind] += 1
        if kind and self.counts[kind] == 1:
            return False  # the first draft pays for what is made once, and tells nothing of the others
        if not SHORTEST_S <= seconds <= LONGEST_S:
            seconds = math.inf  # weighs nothing; but is counted, as on other ranks, whose clocks did not jump
        x = np.array(features, dtype=np.float64) / seconds
        expected = float(self.prior @ x)
        self._fit = KEPT * self._fit + expected
        self._square = KEPT * self._square + expected * expected
        self._products[kind] = KEPT * self._products[kind] + x[:, None] * x
        self._sums[kind] = KEPT * self._sums[kind] + x
        count = self.counts[kind]
        return count & (count - 1) == 0 or count % LEARN_EVERY == 0

    @property
    def is_known(self) -> bool:
        """Whether anything was observed; the same on all ranks."""
        plain, drafted = self.counts
        return plain > 0 or drafted > 1

    def scale(self, unseen: float = 1.0) -> float:
        """How many times as long as the prior expects; `unseen` where nothing was observed."""
        return self._fit / self._square if self._square > 0 else unseen

    def learn(self, unseen: float = 1.0) -> None:
        """Weights from everything observed so far."""
        prior = self.prior * self.scale(unseen)
        products = self._products.sum(axis=0) + np.diag(PULL / prior**2)
        sums = self._sums.sum(axis=0) + PULL / prior
        used = np.ones(len(prior), dtype=bool)
        self.weights = np.zeros(len(prior))
        while used.any():  # what would cost less than nothing costs nothing, and the rest is fitted without it
            found = np.linalg.solve(products[np.ix_(used, used)], sums[used])
            if (found >= 0).all():
                self.weights[used] = found
                break
            used[np.flatnonzero(used)[found < 0]] = False


def step_features(batch: int, rows: int | NDArray[Any], is_verifying: bool | NDArray[Any]) -> Features:
    """Of a step of the target with so many rows, that verifies drafts or not."""
    return 1.0, batch, rows, is_verifying


def draft_features(batch: int, drafts: int | NDArray[Any]) -> Features:
    return 1.0, batch, drafts, batch * drafts


class Plan(NamedTuple):
    """What steps of a batch do."""

    drafts: int  # of each request
    least: float  # survival that a draft must reach to be verified
    seconds: float = 0.0  # of such a step with its draft
    others: tuple[tuple[int, float], ...] = ()  # numbers of drafts that may be tried instead; seconds lost by that


class Costs:
    """Seconds of a step of the target without its draft, and of a draft, for batches of one kind on this machine.

    They are linear in a few counts of a step. The weights begin in the proportions of `schedule.CPU_STEP` and
    `CPU_DRAFT`, at a scale that the first steps set; every step then moves them by least squares of relative errors,
    with a little pull towards those proportions: it decides what no step has told (a request from a row, where there is
    but one).
    """

    def __init__(self, load: float, like: Costs | None = None) -> None:
        """load: multiplications of the head for one draft, by those of the target for a row. like: batches of another
        kind, whose costs are believed at first."""
        step, per_request, per_row = CPU_STEP
        drafting, of_request, per_draft, per_token = CPU_DRAFT
        per_token = max(per_token, load * per_row)
        priors = 1e-3 * np.array(
            [[step, per_request, per_row, VERIFYING], [drafting - VERIFYING, of_request, per_draft, per_token]]
        )
        if like is not None:
            found = like.weights()
            scale = (found.sum(axis=1) / priors.sum(axis=1))[:, None]
            priors = np.maximum(found, FLOOR * scale * priors)
        self.steps, self.drafts = map(Line, priors)
        self._spare = defaultdict[int, float](float)  # seconds, by what may be tried

    def step(self, batch: int, rows: int | NDArray[Any], is_verifying: bool | NDArray[Any]) -> Floats:
        return self.steps(step_features(batch, rows, is_verifying))

    def draft(self, batch: int, drafts: int | NDArray[Any]) -> Floats:
        return np.where(np.greater(drafts, 0), self.drafts(draft_features(batch, drafts)), 0.0)

    def weights(self) -> Floats:
        """[2, 4]"""
        return np.stack([self.steps.weights, self.drafts.weights])

    def learn(self, share: Callable[[Floats], Floats]) -> None:
        """Weights from everything observed; of drafts nobody has seen, as much slower as steps are."""
        self.steps.learn()
        self.drafts.learn(self.steps.scale())
        self.steps.weights, self.drafts.weights = share(self.weights())

    def tries(self, plan: Plan) -> int | None:
        """How many drafts this step tries in place of the plan's; None: it follows the plan."""
        plain, drafted = self.steps.counts
        if plan.drafts and not plain and drafted >= SOON:
            return 0
        for drafts, lost in plan.others:
            self._spare[drafts] += TRIED / len(plan.others) * plan.seconds
            if self._spare[drafts] >= lost:
                self._spare[drafts] = 0.0
                return drafts
        return None


class Drafted(NamedTuple):
    """What the last drafted step knew of its requests."""

    kind: NDArray[np.int64]  # [B]
    confidence: Floats  # [B, K]
    kept: list[int]  # drafts of each that were handed on


class Survival:
    """The plan of one server."""

    def __init__(
        self,
        rates: Floats,  # [2, K], of the head's card
        load: float,
        least: float | None = None,
        share: Callable[[Floats], Floats] = lambda weights: weights,
    ) -> None:
        """least: None, drafts are made and cut as it pays; else cut where they are less likely to survive; 0: never.
        load: of Costs. share: makes one rank's costs those of all, who must draft alike."""
        self.acceptance, self.given = Acceptance(rates), least
        self._load, self._costs = load, dict[tuple[int, bool], Costs]()
        self._share, self._is_drawn = share, False
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self._drafted: Drafted | None = None  # in the step before
        self._batch: tuple[str, ...] = ()
        self._left = 0.0

    def plan(self, num_greedy: int, num_sampled: int, most: int) -> tuple[int, float]:
        """(drafts of each request, the survival a draft must reach to be verified) for such a batch; most: allowed."""
        if self.given is not None or most == 0:
            return most, self.given or 0.0
        key = num_greedy, num_sampled, most
        self._is_drawn = num_sampled > 0
        if key not in self._plans:
            self._plans[key] = self._best(*key)
        plan = self._plans[key]
        tried = self._of(num_greedy + num_sampled, self._is_drawn).tries(plan)
        return (plan.drafts, plan.least) if tried is None else (tried, 0.0)

    def begin_anew(self, rates: Floats, load: float) -> None:
        """Another head drafts from here on. What steps cost is known; what drafts do is not, of another size."""
        if load != self._load:
            self._load, self._costs = load, {}
        self.acceptance, self._drafted = Acceptance(rates), None
        self._plans.clear()

    def _of(self, batch: int, is_drawn: bool) -> Costs:
        key = batch.bit_length(), is_drawn
        if key not in self._costs:
            known = {other: one for other, one in self._costs.items() if one.steps.is_known}
            like = min(known, key=lambda other: (other[1] != is_drawn, abs(other[0] - key[0])), default=key)
            self._costs[key] = Costs(self._load, known.get(like))
        return self._costs[key]

    def _best(self, num_greedy: int, num_sampled: int, most: int) -> Plan:
        batch, drafts = num_greedy + num_sampled, np.arange(most + 1)
        costs = self._of(batch, num_sampled > 0)
        survival = self.acceptance.rates[:, :most].cumprod(axis=1)  # of a request nothing more is known of
        gained = np.array([num_greedy, num_sampled]) @ survival.cumsum(axis=1)
        tokens = batch + np.concatenate([[0.0], gained])
        seconds = costs.step(batch, batch * (1 + drafts), drafts > 0) + costs.draft(batch, drafts)
        rates = tokens / seconds
        best = int(rates.argmax())
        best = best if rates[best] >= (ALONE if batch == 1 else MARGIN) * rates[0] else 0
        lost = np.maximum(seconds - tokens / rates[best], LOST * seconds)
        others = [min(FEW, most)] if best == 0 else sorted({0, most} - {best})
        tries = tuple((other, float(lost[other])) for other in others)
        row = costs.steps.weights[2]  # seconds of one more row of the target
        return Plan(best, float(row * rates[best]), float(seconds[best]), tries)

    def lengths(self, confidence: Floats, kind: NDArray[np.int64], least: float) -> list[int]:
        """Drafts to verify of each request, a prefix of those that were made; kind: [B]."""
        if least <= 0:
            return [confidence.shape[1]] * len(confidence)
        survival = self.acceptance.survival_of(confidence, kind)  # falls along k
        return (survival >= least).sum(axis=1).tolist()

    def begin(
        self, names: Sequence[str], verified: Sequence[int], emitted: Sequence[int], is_plain_decoding: bool
    ) -> int:
        """The step behind `end` is over: its requests, drafts verified and tokens emitted of each (0: a prompt not read
        to its end). is_plain_decoding: no prompt was read. Returns how many drafts were cut since then."""
        now, batch = time.perf_counter(), tuple(names)
        cut = self._observe(batch, verified, emitted)
        if self.given is None and is_plain_decoding and batch == self._batch:
            features = step_features(len(batch), len(batch) + sum(verified), any(verified))
            costs = self._of(len(batch), self._is_drawn)
            if costs.steps.observe(features, now - self._left):
                self._learn(costs)
        return cut

    def end(self, names: Sequence[str], drafted: Drafted | None, seconds: float) -> None:
        """The step's draft is over and took so long; drafted: None where the head was not run."""
        if drafted is not None and self.given is None:
            batch, drafts = drafted.confidence.shape
            self._of(batch, self._is_drawn).drafts.observe(draft_features(batch, drafts), seconds)
        self._drafted, self._batch, self._left = drafted, tuple(names), time.perf_counter()

    def _observe(self, names: Sequence[str], verified: Sequence[int], emitted: Sequence[int]) -> int:
        last, rows = self._drafted, {name: row for row, name in enumerate(self._batch)}
        there = [(i, rows[name]) for i, name in enumerate(names) if emitted[i] and name in rows]
        if last is None or not there:
            return 0
        now, before = np.array(there).T
        tried, got = np.array(verified)[now], np.array(emitted)[now] - 1
        if self.given != 0:
            self.acceptance.observe(last.kind[before], last.confidence[before], tried, got)
        return int(sum(last.kept[row] for row in before) - tried.sum())

    def _learn(self, costs: Costs) -> None:
        costs.learn(self._share)
        self._plans.clear()
