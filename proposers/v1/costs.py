"""What a step and a draft take on this machine with this model: learnt from the steps as they run.

Seconds are linear in a few counts of a step. The weights begin in the proportions of `schedule.CPU_STEP` and
`CPU_DRAFT`, at a scale that the first steps set; every step then moves them by least squares of relative errors, with a
little pull towards those proportions: it decides what no step has told (a request from a row, where there is but one).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_mtpc.proposers.config.schedule import CPU_DRAFT, CPU_STEP

Floats = NDArray[np.float64]
Features = Sequence[float] | Floats  # [4], or [N, 4]
KEPT = 0.998  # of what was learnt of a kind of step, per step of the kind
PULL = 0.01  # of each weight towards its prior, in steps
LEARN_EVERY = 32  # steps of a kind, behind its 1st, 2nd, 4th, 8th, 16th
FLOOR = 0.05  # of a prior that another kind of batch has found to be nothing
VERIFYING = 0.5  # ms, of the first number of CPU_DRAFT: the rest of it is drafting


class Line:
    """Seconds = weights . features, with the proportions of `prior` (weights) where nothing was seen."""

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = np.array(prior, dtype=np.float64)
        self._products = np.zeros((2, len(prior), len(prior)))  # of plain steps, of drafted ones
        self._sums = np.zeros((2, len(prior)))
        self._fit, self._square = 0.0, 0.0  # of what the prior expects, by what it took
        self.counts, self.weights = [0, 0], self.prior  # observed, by the same kinds

    def __call__(self, features: Features) -> Floats:
        return np.asarray(features) @ self.weights

    def observe(self, features: Sequence[float], seconds: float) -> bool:
        """A step that took so long. Errors are relative to it: one that another process delayed weighs little.

        Returns whether it is time to learn: its kind is new, or many were observed.
        """
        kind = int(features[-1] > 0)  # what is seldom seen is not forgotten because of what is seen often
        self.counts[kind] += 1
        if kind and self.counts[kind] == 1:
            return False  # the first draft pays for what is made once, and tells nothing of the others
        x = np.array(features, dtype=np.float64) / seconds
        expected = float(self.prior @ x)
        self._fit = KEPT * self._fit + expected
        self._square = KEPT * self._square + expected * expected
        self._products[kind] *= KEPT
        self._products[kind] += x[:, None] * x
        self._sums[kind] *= KEPT
        self._sums[kind] += x
        count = self.counts[kind]
        return count & (count - 1) == 0 or count % LEARN_EVERY == 0

    @property
    def is_known(self) -> bool:
        """Whether anything was observed."""
        return self._square > 0

    @property
    def scale(self) -> float:
        """How many times as long as the prior expects."""
        return self._fit / self._square if self.is_known else 1.0

    def learn(self) -> None:
        """Weights from everything observed so far."""
        if not self.is_known:
            return
        prior = self.prior * self.scale
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


class Costs:
    """Seconds of a step of the target without its draft, and of a draft, for batches of one kind."""

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
            found = like.weights
            scale = (found.sum(axis=1) / priors.sum(axis=1))[:, None]
            priors = np.maximum(found, FLOOR * scale * priors)
        self.steps, self.drafts = Line(priors[0]), Line(priors[1])

    def step(self, batch: int, rows: Floats | int, is_verifying: Floats | bool) -> Floats:
        """Seconds of steps with so many rows, each that verifies drafts or not."""
        return self.steps(np.stack(np.broadcast_arrays(1.0, batch, rows, is_verifying), axis=-1))

    def draft(self, batch: int, drafts: Floats | int) -> Floats:
        drafts = np.asarray(drafts, dtype=np.float64)
        features = np.stack(np.broadcast_arrays(1.0, batch, drafts, batch * drafts), axis=-1)
        return np.where(drafts > 0, self.drafts(features), 0.0)

    def learn(self) -> None:
        """Weights from everything observed; of drafts nobody has seen, as much slower as steps are."""
        self.steps.learn()
        if self.drafts.is_known:
            self.drafts.learn()
        else:
            self.drafts.weights = self.drafts.prior * self.steps.scale

    @property
    def row(self) -> float:
        """Seconds of one more row of the target."""
        return float(self.steps.weights[2])

    @property
    def weights(self) -> Floats:
        """[2, 4], to be handed to the other ranks."""
        return np.stack([self.steps.weights, self.drafts.weights])

    @weights.setter
    def weights(self, weights: Floats) -> None:
        self.steps.weights, self.drafts.weights = weights


def step_features(batch: int, rows: int, is_verifying: bool) -> tuple[float, ...]:
    return 1.0, batch, rows, float(is_verifying)


def draft_features(batch: int, drafts: int) -> tuple[float, ...]:
    return 1.0, batch, drafts, batch * drafts
