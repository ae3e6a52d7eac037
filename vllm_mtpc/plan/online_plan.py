"""Plan the number K of drafts per request by observed seconds and observed acceptance.

For each bucket of batch sizes, with and without sampled requests, and each K of a few (the arms), the plan keeps

    speed(b, K) = b (1 + sum_k P(the first k drafts are accepted)) / seconds(b, K).

Seconds are a prior (a roofline of the device) times a ratio, observed per bucket and arm; an arm that was not observed
takes the ratio of its bucket, an unobserved bucket that of all. Acceptance is counted per class of requests (greedy or
sampled, context length) and starts at the card of the head. The arm with the highest speed serves.

Other arms are tried for a few steps where their upper confidence bound is above the best speed, unobserved ones in any
case until two observed ones agree with the prior; no drafts, also where few of the last steps had none, since a first
estimate of a cold engine would keep drafts that lose. The serving arm is observed first. Each trial is paid
from the budget of its bucket: EXPLORE of the time of all steps is earned, and what a trial lost is subtracted after it.
A trial does not start before its expected loss is earned.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONTEXTS = (4096, 16384, 65536)  # context lengths at which acceptance is counted from zero again
CLASSES = 2 * (1 + len(CONTEXTS))
PRIOR_COUNT = 4.0  # weight of the card, and of a class of temperatures for its contexts, in observations
ACCEPTANCE_COUNT = 300.0  # of one draft position at most: older observations decay
RETRIED_COUNT = 100.0  # the same when drafts are tried after a time without drafts

SECONDS_COUNT = 48.0  # observed steps of one arm at most: older ones decay
SHARED_COUNT = 0.5  # weight of the ratio of the bucket, and of all buckets, in steps
STALE = 0.985  # decay of the observations of arms that do not serve, per update
SLOWEST = 2.0  # a step counts as at most this multiple of its estimate (a pause of the process, a page fault)
SHORTEST_S, LONGEST_S = 1e-5, 10.0  # of a step; other values are errors of the clock

EXPLORE = 0.008  # share of the time that trials may lose
HEAD_START = 8.0  # steps that the first trials of a bucket may lose
TRIAL_STEPS = 8  # the first two are not observed: their rows and drafts are of different arms
UPDATE_STEPS = 16  # between two updates of the plan
WIDTH = 0.4  # relative standard deviation of the speed of an unobserved arm; divided by sqrt(1 + steps)
AGREE, AGREED_WIDTH = 1.25, 0.15  # largest quotient of the ratios of observed arms that agree; WIDTH then
KNOWN = 3.0  # recent steps without drafts below which they are tried again
LEAST_LOSS = 0.1  # expected of a trial, as a share of its time
REJECTED, REJECTED_COUNT = 0.98, 100  # share of rejected first drafts that is reported, and their minimum number
MARGIN = 1.015  # minimum speed of an arm relative to the serving one that it replaces, and to no drafts


def request_class(is_sampled: bool, context: int) -> int:
    """Return the acceptance class of a request with `context` tokens."""
    return len(CONTEXTS) * is_sampled + is_sampled + sum(context > most for most in CONTEXTS)


class Acceptance:
    """Observed acceptance by class of requests and position of the draft, [CLASSES, K]."""

    def __init__(self, card: Floats) -> None:
        self.card = card  # [2, K]
        self.counts = np.zeros((2, CLASSES, card.shape[1]))  # accepted, verified after accepted ones
        self.steps: dict[tuple[int, int, int], int] = {}  # since the last update, by (class, verified, accepted)

    def observe(self, outcomes: Iterable[tuple[int, int, int]]) -> None:
        """Count (class, verified drafts, accepted drafts) of each request of a step."""
        for outcome in outcomes:
            self.steps[outcome] = self.steps.get(outcome, 0) + 1

    def update(self) -> None:
        for (kind, verified, accepted), count in self.steps.items():
            self.counts[0, kind, :accepted] += count
            self.counts[1, kind, : min(verified, accepted + 1)] += count
        self.steps.clear()
        self.limit(ACCEPTANCE_COUNT)

    def limit(self, most: float) -> None:
        """Scale the counts of each class and position down to `most` verified drafts."""
        self.counts /= np.maximum(self.counts[1] / most, 1.0)

    def rejected_share(self) -> float | None:
        """Return the share of rejected first drafts if nearly all are rejected, else None."""
        accepted, verified = self.counts[:, :, 0].sum(axis=1)
        share = 1 - accepted / max(verified, 1)
        return float(share) if verified >= REJECTED_COUNT and share >= REJECTED else None

    def tokens(self, requests: Floats, arms: Sequence[int]) -> Floats:
        """Return the expected tokens of a request and step with each arm, [A]; requests: [CLASSES], their numbers."""
        accepted, verified = self.counts.reshape(2, 2, -1, self.card.shape[1])  # [2, contexts, K]
        scale = (accepted.sum() + PRIOR_COUNT) / ((verified.sum(1) * self.card).sum() + PRIOR_COUNT)
        parent = shrink(accepted.sum(1), verified.sum(1), scale * self.card)
        cumulative = shrink(accepted, verified, parent[:, None]).reshape(CLASSES, -1).cumprod(axis=1)
        mean = requests @ cumulative / max(requests.sum(), 1)
        return np.array([1 + mean[:drafts].sum() for drafts in arms])


def shrink(accepted: Floats, verified: Floats, prior: Floats) -> Floats:
    """Return rates [..., K]: observed ones, and those of `prior` scaled to the observed mean where few are observed."""
    scale = (accepted.sum(-1, keepdims=True) + PRIOR_COUNT) / ((verified * prior).sum(-1, keepdims=True) + PRIOR_COUNT)
    return (accepted + PRIOR_COUNT * np.minimum(scale * prior, 0.98)) / (verified + PRIOR_COUNT)


class OnlinePlan:
    """The plan of one scheduler.

    `arms` are the numbers of drafts to choose from, increasing from 0. `prior` [max_num_seqs + 1, A]: seconds of a step
    by its number of requests and K; infinite where K is not allowed; only proportions matter. card: see `card_rates`.
    """

    def __init__(self, arms: Sequence[int], prior: Floats, card: Floats) -> None:
        self.arms, self.prior, self.acceptance = tuple(arms), prior, Acceptance(card)
        self.sizes = np.array([max(size - 1, 0).bit_length() for size in range(len(prior))])  # 1, 2, 3-4, 5-8, ...
        self.is_sampled = True  # whether requests are: verifying and drafting for them costs more
        shape = 2 * (int(self.sizes[-1]) + 1), len(self.arms)
        self.ratios = np.ones(shape)  # observed seconds / prior, [buckets, A]
        self.counts, self.recent = np.zeros((2, *shape))  # observed steps, and those not long ago
        self.chosen = np.zeros((2, len(prior)), dtype=np.int64)  # arm without and with sampled requests, by batch size
        self.lookup = [0] * len(prior)  # K by batch size; vLLM's scheduler holds this list, so it is changed in place
        self.earned = np.zeros(shape[0])  # seconds that trials may lose, by bucket
        self.trial: tuple[int, int] | None = None  # (bucket, arm)
        self._left, self._trial_seconds = 0, 0.0
        self._same, self._steps = 0, 0  # consecutive steps of one arm, steps since the last update
        self.shared = 0.0  # seconds of a step beyond the prior, the same for all arms
        self.decoded, self.lost = 0.0, 0.0  # seconds of decoding steps, and of what trials lost, since `take_times`
        self.update(np.ones(CLASSES), 1)

    @property
    def buckets(self) -> NDArray[np.int64]:  # of each batch size with requests as they are now
        return 2 * self.sizes + self.is_sampled

    @property
    def best(self) -> NDArray[np.int64]:  # arm of each batch size
        return self.chosen[int(self.is_sampled)]

    def set_costs(self, costs: Floats) -> None:
        """Start from measured costs of steps, [max_num_seqs + 1, A], in place of the prior."""
        self.prior = np.where(np.isfinite(self.prior), costs, self.prior)

    def finish_step(
        self,
        seconds: float,
        batch: int,
        verified: int,
        drafted: int,
        is_decoding: bool,
        outcomes: Iterable[tuple[int, int, int]] = (),
        is_sampled: bool = True,
    ) -> bool:
        """Learn from a step of the engine, `seconds` after the end of the step before; return whether `update` is due.

        verified, drafted: K of this step. is_decoding: the step, and the one before, read no prompt. outcomes: (class,
        verified drafts, accepted drafts) of each request with drafts. is_sampled: a request is sampled.
        """
        self.acceptance.observe(outcomes)
        if is_sampled != self.is_sampled:
            if self.trial:  # it ends without a result
                self.earned[self.trial[0]] -= self._trial_seconds
            self.is_sampled, self.trial, self._same = is_sampled, None, 0
            return True
        self._steps += 1
        self._same = self._same + 1 if is_decoding and verified == drafted else 0
        if is_decoding and SHORTEST_S <= seconds <= LONGEST_S:
            bucket = int(self.buckets[batch])
            self.earned[bucket] += (EXPLORE if self.earned[bucket] else HEAD_START) * seconds
            self.decoded += seconds
            if self._same >= 2 and drafted in self.arms:
                self._observe(bucket, self.arms.index(drafted), seconds, batch)
        if self.trial is None:
            return self._steps >= UPDATE_STEPS
        self._left -= 1
        self._trial_seconds += seconds
        return self._left <= 0

    def update(self, requests: Floats, batch: int, shared: float = 0.0) -> None:
        """Choose K for all batch sizes; end a trial and begin one for this batch size.

        requests: [CLASSES], numbers of running ones; shared: seconds of a step that are the same for all arms and not
        in the prior (the KV cache is read).
        """
        self.acceptance.update()
        self.shared = shared
        seconds, speeds = self.estimate(requests)
        sizes, best = np.arange(len(self.prior)), speeds.argmax(axis=1)
        best[speeds[sizes, best] < MARGIN * speeds[:, 0]] = 0
        is_better = (speeds[sizes, self.best] * MARGIN < speeds[sizes, best]) | (best == 0)
        self.best[is_better] = best[is_better]
        if self.trial:
            bucket, arm = self.trial
            size = min(2 ** (bucket // 2), len(self.prior) - 1)
            if self.best[size] != arm:
                lost = self._trial_seconds * max(LEAST_LOSS, 1 - speeds[size, arm] / speeds[size].max())
                self.earned[bucket] -= lost
                self.lost += lost
        self.recent *= STALE
        self._steps, self.trial = 0, self._next_trial(seconds[batch], speeds[batch], batch)
        self.lookup[:] = np.array(self.arms)[self.best].tolist()
        if self.trial:
            bucket, arm = self.trial
            self._left, self._trial_seconds = TRIAL_STEPS, 0.0
            for size in np.flatnonzero((self.buckets == bucket) & np.isfinite(self.prior[:, arm])):
                self.lookup[size] = self.arms[arm]
            if self.best[batch] == 0:
                self.acceptance.limit(RETRIED_COUNT)

    def take_times(self) -> dict[str, int]:
        """Return the microseconds of decoding, and those that trials lost, since the last call."""
        taken = {"step_us": round(1e6 * self.decoded), "trial_us": round(1e6 * self.lost)}
        self.decoded = self.lost = 0.0
        return taken

    def estimate(self, requests: Floats) -> tuple[Floats, Floats]:
        """Return seconds of a step and tokens per second, [max_num_seqs + 1, A] each."""
        counts = np.minimum(self.counts, TRIAL_STEPS)
        total = (counts * self.ratios).sum() / counts.sum() if counts.any() else 1.0
        shared = ((counts * self.ratios).sum(1) + SHARED_COUNT * total) / (counts.sum(1) + SHARED_COUNT)  # [buckets]
        ratios = (self.counts * self.ratios + SHARED_COUNT * shared[:, None]) / (self.counts + SHARED_COUNT)
        seconds = (self.prior + self.shared) * ratios[self.buckets]
        tokens = self.acceptance.tokens(requests, self.arms)
        return seconds, np.arange(len(seconds))[:, None] * tokens / seconds

    def _observe(self, bucket: int, arm: int, seconds: float, batch: int) -> None:
        at, ratio = (bucket, arm), seconds / (self.prior[batch, arm] + self.shared)
        if self.counts[at] >= TRIAL_STEPS // 2:
            ratio = min(ratio, SLOWEST * self.ratios[at])
        self.counts[at] += 1
        self.recent[at] = min(self.recent[at] + 1, SECONDS_COUNT)
        self.ratios[at] += (ratio - self.ratios[at]) / min(self.counts[at], 1 + self.recent[at])

    def _next_trial(self, seconds: Floats, speeds: Floats, batch: int) -> tuple[int, int] | None:
        bucket, best = int(self.buckets[batch]), int(self.best[batch])
        if not self.counts[bucket, best]:  # it is tried by serving
            return None
        seen = self.ratios[bucket][self.counts[bucket] >= TRIAL_STEPS // 2]
        is_agreed = len(seen) > 1 and seen.max() < AGREE * seen.min()
        bounds = speeds * (1 + (AGREED_WIDTH if is_agreed else WIDTH) / np.sqrt(1 + self.recent[bucket]))
        if not is_agreed:  # a prior can be wrong by any factor
            bounds[(self.counts[bucket] == 0) & (speeds > 0)] = np.inf
        if self.recent[bucket, 0] < KNOWN:  # what all arms are compared with
            bounds[0] = np.inf
        bounds[best] = 0
        arm = int(bounds.argmax())
        loss = TRIAL_STEPS * seconds[arm] * max(LEAST_LOSS, 1 - speeds[arm] / speeds[best])
        return (bucket, arm) if bounds[arm] > speeds[best] and self.earned[bucket] >= loss else None
