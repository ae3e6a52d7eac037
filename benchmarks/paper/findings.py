"""Claims of the papers, with verdicts computed from the rows of kept results.

A claim names differences that should be positive. It holds if each exceeds two standard errors, does not hold if one is
below minus two, and is within noise otherwise. Differences over the same texts have paired errors; others are combined
as those of independent rows. Cells without a standard error are compared as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

SURE = 2.0  # standard errors


class Difference(NamedTuple):
    """A difference with its standard error; None: not measured."""

    value: float
    error: float | None

    def __sub__(self, other: Difference) -> Difference:  # type: ignore[override]
        errors = (self.error, other.error)
        error = None if None in errors else math.hypot(*(e for e in errors if e is not None))
        return Difference(self.value - other.value, error)

    def __str__(self) -> str:
        return f"{self.value:+.3f}" + ("" if self.error is None else f" ± {self.error:.3f}")


class Claim(NamedTuple):
    """A statement and the differences that it expects to be positive."""

    text: str
    differences: Sequence[Difference]

    def line(self) -> str:
        """Return the claim with its verdict."""
        return f"* {self.text}: **{self.verdict}** ({', '.join(map(str, self.differences))})."

    @property
    def verdict(self) -> str:
        if any(one.error is None for one in self.differences):
            return "true of these rows" if all(one.value > 0 for one in self.differences) else "not true of these rows"
        scores = [one.value / (one.error or math.inf) for one in self.differences]
        if all(score > SURE for score in scores):
            return "holds"
        return "does not hold" if any(score < -SURE for score in scores) else "within noise"
