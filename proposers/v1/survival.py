"""How many drafts are made and verified: as many as pay by what is observed.

Before a batch is drafted for, the number K of drafts is chosen that gives the most tokens per second, by the acceptance
that was observed (`acceptance.py`) and the seconds that steps and drafts took (`costs.py`); with 0 the head is not run.
Behind the head, drafts are cut whose survival is less than the seconds of their row x tokens per second.

The chance of draft k is read off its conditional before the token is drawn: max_v q for an argmax, sqrt(sum_v q(v)^2)
for a draw; what such a confidence is worth is learnt. The cut never looks at draft k: that would keep tokens because of
what they are, and the verifier, which takes them for draws from q, would hand out more of them than the target does.

Batches of about one size, all greedy or not, share what was learnt of costs. So that nothing is believed for ever, a
step now and then does what the plan does not (all drafts, none, or a few), as often as what is believed to be lost by
it stays a small share of the time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_mtpc.proposers.v1.acceptance import Acceptance, Floats
from vllm_mtpc.proposers.v1.costs import Costs, draft_features, step_features

TRIED = 0.02  # of the time may be lost by steps that try something else than the plan
LOST = 0.25  # of its time that a try loses at least, whatever is believed
SOON = 4  # drafted steps of a size behind which one without drafts is tried: what others are measured by
FEW = 2  # drafts that are tried where none pay
# Expected gain below which nothing is drafted. Costs are known to 3 %; and requests of a batch that are accepted
# unevenly end one after the other, so that the batch runs out (how much that costs was not measured by itself)
ALONE, MARGIN = 1.03, 1.1


class Confidence:
    """The circuit's confidence in each draft of a batch, filled while it drafts."""

    def __init__(self, max_num_reqs: int, num_drafts: int, device: torch.device | str = "cpu") -> None:
        self.values = torch.ones(max_num_reqs, num_drafts, device=device)

    def argmax(self, k: int, log_q: Tensor) -> None:
        """Draft k of every request is the argmax of log_q [B, V]."""
        torch.exp(log_q.amax(dim=-1), out=self.values[: len(log_q), k])

    def drawn(self, k: int, probs: Tensor, is_greedy: Tensor) -> None:
        """Draft k is drawn from probs [B, V], or is its argmax where is_greedy [B]."""
        chance = torch.where(is_greedy, probs.amax(dim=-1), torch.linalg.vector_norm(probs, dim=-1))
        self.values[: len(probs), k] = chance

    def of(self, num_reqs: int, num_drafts: int) -> Floats:
        return self.values[:num_reqs, :num_drafts].double().numpy(force=True)


@dataclass(frozen=True)
class Plan:
    """What steps of a batch do."""

    drafts: int  # of each request
    least: float  # survival that a draft must reach to be verified
    seconds: float = 0.0  # of such a step with its draft
    others: tuple[tuple[int, float], ...] = ()  # numbers of drafts that may be tried instead; seconds lost by that


class Batches:
    """What is known of batches of about one size, all greedy or not."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self._spare = costs, defaultdict[int, float](float)  # seconds, by what may be tried

    def tries(self, plan: Plan) -> int | None:
        """How many drafts this step tries in place of the plan's; None: it follows the plan."""
        plain, drafted = self.costs.steps.counts
        if plan.drafts and not plain and drafted >= SOON:
            return 0
        for drafts, lost in plan.others:
            self._spare[drafts] += TRIED / len(plan.others) * plan.seconds
            if self._spare[drafts] >= lost:
                self._spare[drafts] = 0.0
                return drafts
        return None


@dataclass
class Drafted:
    """What the last drafted step knew of its requests."""

    kind: NDArray[np.int64]  # [B]
    confidence: Floats  # [B, K]
    rows: dict[str, int]  # request -> its row
    kept: list[int] = field(default_factory=list)  # drafts of each that were handed on


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
        self._load, self._batches = load, dict[tuple[int, bool], Batches]()
        self._share, self._is_drawn = share, False
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self._last: Drafted | None = None
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
        tried = self._of(num_greedy + num_sampled, num_sampled > 0).tries(plan)
        return (plan.drafts, plan.least) if tried is None else (tried, 0.0)

    def _of(self, batch: int, is_drawn: bool) -> Batches:
        key = batch.bit_length(), is_drawn
        if key not in self._batches:
            known = {other: one.costs for other, one in self._batches.items() if one.costs.steps.is_known}
            like = min(known, key=lambda other: (other[1] != is_drawn, abs(other[0] - key[0])), default=None)
            self._batches[key] = Batches(Costs(self._load, known.get(like)))
        return self._batches[key]

    def _best(self, num_greedy: int, num_sampled: int, most: int) -> Plan:
        batch, drafts = num_greedy + num_sampled, np.arange(most + 1)
        costs = self._of(batch, num_sampled > 0).costs
        gained = np.array([num_greedy, num_sampled]) @ self.acceptance.survival()[:, :most].cumsum(axis=1)
        tokens = batch + np.concatenate([[0.0], gained])
        seconds = costs.step(batch, batch * (1 + drafts), drafts > 0) + costs.draft(batch, drafts)
        rates = tokens / seconds
        best = int(rates.argmax())
        best = best if rates[best] >= (ALONE if batch == 1 else MARGIN) * rates[0] else 0
        lost = np.maximum(seconds - tokens / rates[best], LOST * seconds)
        others = [min(FEW, most)] if best == 0 else sorted({0, most} - {best})
        tries = tuple((other, float(lost[other])) for other in others)
        return Plan(best, costs.row * float(rates[best]), float(seconds[best]), tries)

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
        cut = self._observe(names, verified, emitted)
        if self.given is None and is_plain_decoding and batch == self._batch:
            features = step_features(len(batch), len(batch) + sum(verified), any(verified))
            costs = self._of(len(batch), self._is_drawn).costs
            if costs.steps.observe(features, now - self._left):
                self._learn(costs)
        return cut

    def end(self, names: Sequence[str], drafted: Drafted | None, seconds: float) -> None:
        """The step's draft is over and took so long; drafted: None where the head was not run."""
        if drafted is not None and self.given is None:
            batch, drafts = drafted.confidence.shape
            self._of(batch, self._is_drawn).costs.drafts.observe(draft_features(batch, drafts), seconds)
        self._last, self._batch, self._left = drafted, tuple(names), time.perf_counter()

    def _observe(self, names: Sequence[str], verified: Sequence[int], emitted: Sequence[int]) -> int:
        last = self._last
        if last is None:
            return 0
        there = [(i, last.rows[name]) for i, name in enumerate(names) if emitted[i] and name in last.rows]
        if not there:
            return 0
        now, before = np.array(there).T
        tried, got = np.array(verified)[now], np.array(emitted)[now] - 1
        if self.given != 0:
            self.acceptance.observe(last.kind[before], last.confidence[before], tried, got)
        return int(sum(last.kept[row] for row in before) - tried.sum())

    def _learn(self, costs: Costs) -> None:
        costs.learn()
        costs.weights = self._share(costs.weights)
        self._plans.clear()
