"""Cost curves of a target and its heads on one machine: what a step and a draft take, by requests and drafts.

The file that `vllm-mtpc advise --measure` writes and `--curves` reads is JSON:

    {"step_ms":  [[batch, rows, ms], ...],             a step of the target without its draft: rows = batch (1 + drafts)
     "draft_ms": {"NAME": [[batch, drafts, ms], ...]}, the draft of head NAME (its folder's name, or its circuit)
     "temperature": ..., "target": ..., "hardware", "versions", "commit", "command"}

Pairs are read too: [rows, ms] for steps known by their rows alone, [batch, ms] for drafts of any length.

engine/steps.py measures them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_mtpc.engine.steps import Cell
from vllm_mtpc.errors import UsageError


class Curve:
    """Milliseconds by batch and a second number of it (rows or drafts): linear between what was measured.

    Beyond the largest batch the last slope goes on; elsewhere outside of what was measured the nearest value holds.
    """

    def __init__(self, points: Any, what: str, per_request: bool = False) -> None:
        """per_request: neighbouring batches are asked for the second number of each request, not of the whole batch."""
        self.per_request = per_request
        self.by_batch: dict[int | None, list[tuple[float, float]]] = {}  # None: measured in pairs
        for *batch, number, ms in _checked(points, what):
            self.by_batch.setdefault(int(batch[0]) if batch else None, []).append((number, ms))

    def at(self, batch: int, number: float, pairs_by: float) -> float:
        """ms at (batch, number); a curve of pairs is read at `pairs_by`."""
        if None in self.by_batch:
            return _line(self.by_batch[None], pairs_by)
        across = []
        for known, points in self.by_batch.items():
            wanted = number * known / batch if self.per_request else number
            across.append((known, float(np.interp(wanted, *zip(*sorted(points), strict=True)))))
        return _line(across, batch)


class Curves:
    """A file of cost curves."""

    def __init__(self, values: Any, source: str = "curves") -> None:
        if not isinstance(values, dict) or not isinstance(values.get("draft_ms"), dict):
            raise UsageError(
                f'{source}: no cost curves; a file with "step_ms" and "draft_ms" is needed: vllm-mtpc advise --measure'
            )
        self.source = source
        self.step_curve = Curve(values.get("step_ms"), f"{source}: step_ms", per_request=True)
        self.draft_curves = {
            name: Curve(points, f"{source}: draft_ms[{name!r}]") for name, points in values["draft_ms"].items()
        }

    @classmethod
    def read(cls, file: Path) -> Curves:
        """Raises UsageError."""
        try:
            return cls(json.loads(file.read_text(encoding="utf-8")), str(file))
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{file}: cannot be read as JSON ({error}); name a file of --measure") from None

    def step(self, batch: int, drafts: int) -> float:
        """ms of a step of the target that verifies so many drafts of each request."""
        rows = batch * (1 + drafts)
        return self.step_curve.at(batch, rows, rows)

    def draft(self, names: Sequence[str], batch: int, drafts: int) -> float:
        """ms of a draft; `names`: what the head may be called there, the first that is known counts."""
        if drafts == 0:
            return 0.0
        name = next((name for name in names if name in self.draft_curves), None)
        if name is None:
            raise UsageError(
                f"{self.source}: has drafts of {', '.join(self.draft_curves) or 'no head'}, none called "
                f"{' or '.join(names)}; measure it: vllm-mtpc advise {names[0]} --measure FILE"
            )
        return self.draft_curves[name].at(batch, drafts, batch)


def _line(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear between points and beyond the last one; the first value in front of the first."""
    xs, ys = zip(*sorted(points), strict=True)
    if len(xs) > 1 and x > xs[-1]:
        return ys[-1] + max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])) * (x - xs[-1])
    return float(np.interp(x, xs, ys))


def _checked(points: Any, what: str) -> list[Sequence[float]]:
    if not isinstance(points, list) or not points:
        raise UsageError(f"{what}: allowed is a list of [batch, number, ms] or of pairs, with one entry at least")
    sizes = {len(point) if isinstance(point, list) else 0 for point in points}
    numbers = all(isinstance(value, (int, float)) for point in points if isinstance(point, list) for value in point)
    if sizes not in ({2}, {3}) or not numbers or not all(math.isfinite(v) and v >= 0 for p in points for v in p):
        raise UsageError(f"{what}: allowed are [batch, number, ms] or pairs of numbers from 0 on, all of one kind")
    return points


def cells(batches: Sequence[int], num_drafts: int) -> list[Cell]:
    """What is measured: every batch size, with 0, 1, 2, 4, ... and all drafts."""
    powers = {1 << power for power in range(num_drafts.bit_length())}
    return [(batch, drafts) for batch in batches for drafts in sorted({0, num_drafts} | powers)]
