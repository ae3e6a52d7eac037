"""Figures of a training run and of heads.

Each figure is written as PNG and SVG. The same numbers give the same files: no dates, fixed ids. Colour-blind readers
can tell the colours apart; markers differ as well, for greyscale prints.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STYLE = {
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "vllm_mtpc",  # otherwise ids of an SVG differ from run to run
}
NO_DATES = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
MARKERS = "^sDovPX*"
TITLES = {"t1": "T=1 (sampling)", "t0": "T=0 (greedy)"}

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]  # head -> "t1" or "t0" -> fields of eval's StepMetrics


@contextmanager
def panels(files: Sequence[Path], count: int, size: tuple[float, float], **shared: Any) -> Iterator[list[Any]]:
    """Yield axes side by side, then write them to files; no display is needed, and the caller's style is restored."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["tableau-colorblind10", STYLE], after_reset=True):
        figure = Figure(figsize=size)
        yield list(figure.subplots(1, count, squeeze=False, **shared).flat)
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, metadata=NO_DATES[file.suffix[1:]])


def plot_loss(metrics: Sequence[Mapping[str, Any]], folder: Path, unit: str) -> list[Path]:
    """Draw loss.png and .svg: the lines of metrics.jsonl over optimiser steps. `unit`: of the loss."""
    files = [folder / f"loss.{kind}" for kind in NO_DATES] if metrics else []
    labels = {"loss": f"loss ({unit})", "tokens_per_step": "tokens/step, T=1 (training data)"}
    with panels(files, 2, (7.2, 2.7)) as axes:
        for axis, (key, label) in zip(axes, labels.items(), strict=True):
            axis.plot([line["step"] for line in metrics], [line[key] for line in metrics])
            axis.set(xlabel="optimiser steps", ylabel=label)
    return files


def plot_acceptance(results: Results, folder: Path) -> list[Path]:
    """Draw acceptance.png and .svg: P(drafts 1 to k are all accepted) over k, a panel per temperature."""
    temperatures = [key for key in ("t1", "t0") if any(key in values for values in results.values())]
    if not temperatures:
        return []
    files = [folder / f"acceptance.{kind}" for kind in NO_DATES]
    with panels(files, len(temperatures), (3.6 * len(temperatures), 3.0), sharey=True) as axes:
        for axis, key in zip(axes, temperatures, strict=True):
            for (name, values), marker in zip(results.items(), itertools.cycle(MARKERS), strict=False):
                if key in values:
                    shares, total = list(values[key]["per_position"]), values[key]["tokens_per_step"]
                    label = f"{name}: {total:.2f} ± {values[key]['standard_error']:.2f}"
                    axis.plot(range(1, len(shares) + 1), shares, label=label, marker=marker)
            axis.set(title=TITLES[key], xlabel="draft k", ylim=(0, 1))
            axis.locator_params(axis="x", integer=True)
            axis.legend(title="tokens/step ± s.e.")
        axes[0].set_ylabel("P(drafts 1 to k are all accepted)")
    return files
