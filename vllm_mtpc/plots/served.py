"""Plots of a result of `vllm-mtpc bench serve`: throughput against latency, tokens/step against the draft's share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.plots.heads import LABEL_PLACES
from vllm_mtpc.plots.style import PLAIN, Look, looks_of, panels, save, temperature_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = Mapping[str, Any]
_UNSAFE = re.compile(r"\W+")


def plot_served(rows: Sequence[Row], folder: Path, name: str) -> list[Path]:
    """`name`-latency and `name`-frontier, each .png and .svg, one pair per group of rows that may be compared.

    rows: of the result. Further groups get their name in the file's. Returns the files written.
    """
    groups = list(dict.fromkeys(row["group"] for row in rows))
    files = []
    for group in groups:
        mine = [row for row in rows if row["group"] == group]
        stem = name if group == groups[0] else f"{name}-{_UNSAFE.sub('-', group).lower()}"
        files += plot_latency(mine, folder, f"{stem}-latency")
        files += plot_shares(mine, folder, f"{stem}-frontier")
    return files


def milliseconds_per_token(row: Row) -> float:
    """Of one request: TPOT where answers were streamed; else the time in which each of them gains a token."""
    return row["tpot_ms"] or 1000 * row["clients"] / row["tokens_per_second"]


def plot_latency(rows: Sequence[Row], folder: Path, name: str) -> list[Path]:
    """Throughput over time per token, a line per way of decoding along its numbers of clients, a panel per T."""

    def draw(axis: Axes, decoding: str, mine: Sequence[Row], look: Look) -> None:
        mine = sorted(mine, key=lambda row: row["clients"])
        x, y = [milliseconds_per_token(row) for row in mine], [row["tokens_per_second"] for row in mine]
        axis.plot(x, y, color=look.colour, marker=look.marker, linestyle=look.dashes, linewidth=1.4, label=decoding)
        if decoding == "plain":
            for row, *at in zip(mine, x, y, strict=True):
                axis.annotate(f"c={row['clients']}", at, xytext=LABEL_PLACES[1], textcoords="offset points", fontsize=7)

    labels = ("milliseconds per token of a request", "tok/s of all requests")
    return _panels(rows, folder, name, draw, labels, logarithmic=True)


def plot_shares(rows: Sequence[Row], folder: Path, name: str) -> list[Path]:
    """Tokens/step over the draft's share of a step, at the fewest clients; nothing where steps were not timed."""
    fewest = min((row["clients"] for row in rows), default=0)
    timed = [row for row in rows if row["clients"] == fewest and row["draft_share"] is not None]

    def draw(axis: Axes, decoding: str, mine: Sequence[Row], look: Look) -> None:
        at = 100 * mine[0]["draft_share"], mine[0]["tokens_per_step"]
        axis.plot(*at, color=look.colour, marker=look.marker, linestyle="none", markersize=7, label=decoding)

    labels = (f"draft's share of a step, % (c={fewest})", "tokens/step")
    return _panels(timed, folder, name, draw, labels, logarithmic=False)


def _panels(
    rows: Sequence[Row],
    folder: Path,
    name: str,
    draw: Callable[[Axes, str, Sequence[Row], Look], None],
    labels: tuple[str, str],
    logarithmic: bool,
) -> list[Path]:
    """A panel per temperature; every way of decoding has one look in all of them."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    decodings = list(dict.fromkeys(row["decoding"] for row in rows))
    if not temperatures:
        return []
    looks = looks_of([decoding for decoding in decodings if decoding != "plain"]) | {"plain": PLAIN}
    with panels(1, len(temperatures), (4.2 * len(temperatures), 3.6), sharey=True) as (figure, axes):
        for axis, temperature in zip(axes, temperatures, strict=True):
            for decoding in decodings:
                mine = [row for row in rows if (row["temperature"], row["decoding"]) == (temperature, decoding)]
                if mine:
                    draw(axis, decoding, mine, looks[decoding])
            axis.set_title(temperature_label(f"t{temperature:g}"), fontsize=9)
            axis.set_xlabel(labels[0])
            if logarithmic:
                _logarithmic(axis)
        axes[0].set_ylabel(labels[1])
        axes[0].legend(fontsize=8, loc="best")
        return save(figure, folder, name)


def _logarithmic(axis: Axes) -> None:
    """Both axes, with plain numbers at 1, 2 and 5."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_xscale("log")
    axis.set_yscale("log")
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        one.set_minor_locator(NullLocator())
        one.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
