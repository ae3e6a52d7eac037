"""Figure 1 of the MtPC paper: expressiveness against latency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.paper.frame import Row

MARKERS = {"none": "*", "FF": "o", "CP": "s", "HMM": "^", "BTREE": "D"}


def draw_frontier(rows: Sequence[Row], file: Path) -> None:
    """Tokens/step over milliseconds per step; on a line tok/s are equal, up and left is faster."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    times, lengths = (np.array([row[key] for row in rows]) for key in ("step_ms", "tokens_per_step"))
    across = np.linspace(0.9 * times.min(), 1.05 * times.max(), 50)
    top = 1.1 * lengths.max()
    for rate in np.linspace(*np.percentile(1000 * lengths / times, (0, 100)), 5):
        axes.plot(across, rate * across / 1000, color="0.85", zorder=0)
        right = min(across[-1], 1000 * top / rate)  # where the line leaves the picture
        axes.annotate(
            f"{rate:.0f} tok/s", (right, rate * right / 1000), ha="right", va="bottom", fontsize=7, color="0.4"
        )
    for kind, marker in MARKERS.items():
        for n, face in ((1, "0.4"), (8, "C0"), (16, "C3")):
            some = [row for row in rows if (row["circuit"], row["n"]) == (kind, n)]
            label = "plain" if kind == "none" else f"{kind}, n={n}"
            if some:
                points = [row["step_ms"] for row in some], [row["tokens_per_step"] for row in some]
                axes.scatter(*points, marker=marker, color=face, label=label, s=40)
    axes.set(xlabel="milliseconds per step", ylabel="tokens/step, served", ylim=(0.9, top))
    axes.legend(fontsize=7, ncols=2)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
