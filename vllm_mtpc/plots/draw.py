"""Figures of a training run, of heads, and of results of `vllm-mtpc bench serve`.

Each figure is written as PNG and SVG. The same numbers give the same files: no dates, fixed ids. Colours are those of
Okabe and Ito, which colour-blind readers can tell apart; markers and dashes differ as well, for greyscale prints.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.circuits import CIRCUITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "figure.constrained_layout.use": True,
    "svg.hashsalt": "vllm_mtpc",  # otherwise ids of an SVG differ from run to run
}
NO_DATES = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
LOOKS: list[dict[str, Any]] = [  # arguments of matplotlib
    {"color": "#E69F00", "marker": "^", "linestyle": ":"},
    {"color": "#009E73", "marker": "s", "linestyle": "-."},
    {"color": "#CC79A7", "marker": "D", "linestyle": "--"},
    {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    {"color": "#D55E00", "marker": "v", "linestyle": (0, (5, 1))},
    {"color": "#56B4E9", "marker": "P", "linestyle": (0, (3, 1, 1, 1))},
    {"color": "#000000", "marker": "X", "linestyle": (0, (1, 1))},
    {"color": "#8C6D31", "marker": "*", "linestyle": (0, (7, 2))},
]
CIRCUIT_LOOKS = dict(zip(CIRCUITS, itertools.cycle(LOOKS), strict=False))
TITLES = {"t1": "T=1 (sampling)", "t0": "T=0 (greedy)"}
PLAIN = {"color": "#000000", "marker": "*", "linestyle": "-"}  # decoding without drafts

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]  # head -> "t1" or "t0" -> fields of eval's StepMetrics


def looks_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a look for each name: that of the circuit it starts with if unused, else the next unused one."""
    looks: dict[str, dict[str, Any]] = {}
    for name in names:
        own = CIRCUIT_LOOKS.get(name.split(" ")[0])
        if own is not None and own not in looks.values():
            looks[name] = own
    others = itertools.cycle([look for look in LOOKS if look not in looks.values()])
    return {name: looks.get(name) or next(others) for name in names}


@contextmanager
def panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> Iterator[tuple[Figure, list[Axes]]]:
    """Yield a figure and its panels, row by row; no display is needed, and the caller's style is restored."""
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(STYLE, after_reset=True):
        figure = Figure(figsize=size)
        yield figure, list(figure.subplots(rows, columns, squeeze=False, **shared).flat)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write `name`.svg and `name`.png and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {kind: folder / f"{name}.{kind}" for kind in NO_DATES}
    for kind, file in files.items():
        figure.savefig(file, format=kind, metadata=NO_DATES[kind])
    return list(files.values())


def plot_loss(metrics: Sequence[Mapping[str, Any]], folder: Path, unit: str) -> list[Path]:
    """Draw loss.png and .svg: the lines of metrics.jsonl over optimiser steps. `unit`: of the loss."""
    if not metrics:
        return []
    labels = {"loss": f"loss ({unit})", "tokens_per_step": "tokens/step, T=1 (training data)"}
    with panels(1, 2, (7.2, 2.7)) as (figure, axes):
        for axis, (key, label) in zip(axes, labels.items(), strict=True):
            axis.plot([line["step"] for line in metrics], [line[key] for line in metrics], color=LOOKS[3]["color"])
            axis.set(xlabel="optimiser steps", ylabel=label)
        return save(figure, folder, "loss")


def plot_acceptance(results: Results, folder: Path) -> list[Path]:
    """Draw acceptance.png and .svg: P(drafts 1 to k are all accepted) over k, a panel per temperature."""
    temperatures = [key for key in ("t1", "t0") if any(key in values for values in results.values())]
    if not temperatures:
        return []
    looks = looks_of(list(results))
    with panels(1, len(temperatures), (3.6 * len(temperatures), 3.0), sharey=True) as (figure, axes):
        for axis, key in zip(axes, temperatures, strict=True):
            for name, values in results.items():
                if key in values:
                    shares, total = list(values[key]["per_position"]), values[key]["tokens_per_step"]
                    label = f"{name}: {total:.2f} ± {values[key]['standard_error']:.2f}"
                    axis.plot(range(1, len(shares) + 1), shares, label=label, **looks[name])
            axis.set(title=TITLES[key], xlabel="draft k", ylim=(0, 1))
            axis.locator_params(axis="x", integer=True)
            axis.legend(title="tokens/step ± s.e.")
        axes[0].set_ylabel("P(drafts 1 to k are all accepted)")
        return save(figure, folder, "acceptance")


def plot_served(rows: Sequence[Mapping[str, Any]], folder: Path, name: str) -> list[Path]:
    """Draw `name`-latency.png and .svg: throughput over milliseconds per token, a line per decoding along its clients.

    Args:
        rows: of a result of `vllm-mtpc bench serve`. Groups, in results of version 0.2, have a figure each, and add
            their name to the file's. The time per token is TPOT where answers were streamed, else the clients divided
            by the throughput.
    """
    files = []
    for number, group in enumerate(dict.fromkeys(row.get("group", "") for row in rows)):
        suffix = "-" + re.sub(r"\W+", "-", group).lower() if number else ""
        found = [row for row in rows if row.get("group", "") == group]
        temperatures = list(dict.fromkeys(row["temperature"] for row in found))
        looks = looks_of([name for name in dict.fromkeys(row["decoding"] for row in found) if name != "plain"])
        with panels(1, len(temperatures), (4.2 * len(temperatures), 3.6), sharey=True) as (figure, axes):
            for axis, temperature in zip(axes, temperatures, strict=True):
                for decoding, look in {**looks, "plain": PLAIN}.items():
                    mine = [row for row in found if (row["temperature"], row["decoding"]) == (temperature, decoding)]
                    mine.sort(key=lambda row: row["clients"])
                    times = [row["tpot_ms"] or 1000 * row["clients"] / row["tokens_per_second"] for row in mine]
                    if mine:
                        axis.loglog(times, [row["tokens_per_second"] for row in mine], label=decoding, **look)
                title = TITLES.get(f"t{temperature:g}", f"T={temperature:g}")
                axis.set(title=title, xlabel="milliseconds per token of a request")
            axes[0].set_ylabel("tok/s of all requests")
            axes[0].legend()
            files += save(figure, folder, f"{name}{suffix}-latency")
    return files
