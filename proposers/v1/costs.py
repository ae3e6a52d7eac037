"""What a step and a draft take on this machine with this model: learnt from the steps as they run.

Seconds are linear in a few counts of a step. The weights begin in the proportions of `schedule.CPU_STEP` and
`CPU_DRAFT`, at a scale that the first steps set; every step then moves them by least squares of relative errors, with a
little pull towards those proportions: it decides what no step has told (a request from a row, where there is but one).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_mtpc.proposers.seam.schedule import CPU_DRAFT, CPU_STEP

Floats = NDArray[np.float64]
KEPT = 0.998  # of what was learnt of a kind of step, per step of the kind
PULL = 0.01  # of each weight towards its prior, in steps
VERIFYING = 0.5  # ms, of the first number of CPU_DRAFT: the rest of it is drafting


class Line:
    """Seconds = weights . features, with the proportions of `prior` (weights) where nothing was seen."""

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = np.array(prior, dtype=np.float64)
        self._products = np.zeros((2, len(prior), len(prior)))  # of plain steps, of drafted ones
        self._sums = np.zeros((2, len(prior)))
        self._took = self._expected = 0.0
        self.count, self.weights = 0, self.prior

    def __call__(self, features: Sequence[float]) -> float:
        return float(np.dot(self.weights, features))

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """A step that took so long. Errors are relative to it: one that another process delayed weighs little."""
        x = np.array(features, dtype=np.float64)
        self.count += 1
        self._took = KEPT * self._took + seconds
        self._expected = KEPT * self._expected + float(self.prior @ x)
        kind = int(x[-1] > 0)  # what is seldom seen is not forgotten because of what is seen often
        x /= seconds
        self._products[kind] = KEPT * self._products[kind] + np.outer(x, x)
        self._sums[kind] = KEPT * self._sums[kind] + x

    def learn(self) -> None:
        """Weights from everything observed so far."""
        if not self.count:
            return
        prior = self.prior * self._took / self._expected
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

    def __init__(self, load: float) -> None:
        """load: multiplications of the head for one draft, by those of the target for a row."""
        step, per_request, per_row = CPU_STEP
        drafting, of_request, per_draft, per_token = CPU_DRAFT
        self.steps = Line([1e-3 * ms for ms in (step, per_request, per_row, VERIFYING)])
        per_token = max(per_token, load * per_row)
        self.drafts = Line([1e-3 * ms for ms in (drafting - VERIFYING, of_request, per_draft, per_token)])

    def step(self, batch: int, rows: int, is_verifying: bool) -> float:
        return self.steps(step_features(batch, rows, is_verifying))

    def draft(self, batch: int, drafts: int) -> float:
        return self.drafts(draft_features(batch, drafts)) if drafts else 0.0

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


def step_features(batch: int, rows: int, is_verifying: bool) -> list[float]:
    return [1.0, batch, rows, float(is_verifying)]


def draft_features(batch: int, drafts: int) -> list[float]:
    return [1.0, batch, drafts, batch * drafts]
