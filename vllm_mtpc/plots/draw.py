"""Plots of a training run, of heads, and of a result of `vllm-mtpc bench serve`.

Each is written as PNG and SVG, and the same numbers give the same files: no dates, fixed ids. matplotlib is imported
when a plot is drawn. Colours are Okabe and Ito's, safe for colour-blind readers; markers and dashes differ as well, so
that nothing is lost in greyscale.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mtpc.circuits import CIRCUITS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.title_fontsize": 8,
    "figure.constrained_layout.use": True,
    "savefig.dpi": 110,
    "svg.hashsalt": "vllm_mtpc",  # otherwise ids of an SVG differ from run to run
}
NO_DATES = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}
LOOKS = [  # arguments of matplotlib
    {"color": colour, "marker": marker, "linestyle": dashes}
    for colour, marker, dashes in (
        ("#E69F00", "^", ":"),
        ("#009E73", "s", "-."),
        ("#CC79A7", "D", "--"),
        ("#0072B2", "o", "-"),
        ("#D55E00", "v", (0, (5, 1))),
        ("#56B4E9", "P", (0, (3, 1, 1, 1))),
        ("#000000", "X", (0, (1, 1))),
        ("#8C6D31", "*", (0, (7, 2))),
    )
]
CIRCUIT_LOOKS = dict(zip(CIRCUITS, itertools.cycle(LOOKS), strict=False))
PLAIN = {"color": "#000000", "marker": "*", "linestyle": "-"}  # decoding without drafts

UNSAFE = re.compile(r"\W+")
LOSS_COLOUR = "#0072B2"
SMOOTHED_FROM = 40  # lines of metrics
BESIDE = 12  # points from a marker that a label needs no line for
LABEL_LINE = {"arrowstyle": "-", "color": "#8c8c8c", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
LABEL_PLACES = [  # points from a marker, near ones first
    (round(away * math.cos(angle)), round(away * math.sin(angle)))
    for away in (7, 12, 20, 30, 42, 56, 72, 90)
    for angle in [math.radians(degrees) for degrees in (40, -40, 140, -140, 90, -90, 15, -15, 165, -165, 65, -65)]
]
RATE_TEXT: dict[str, Any] = {"rotation_mode": "anchor", "transform_rotates_text": True, "fontsize": 7}
RATE_TEXT |= {"ha": "right", "va": "bottom", "color": "#6e6e6e"}

Row = Mapping[str, Any]  # of a result of `vllm-mtpc bench serve`


def looks_of(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A look for each name, no two the same among the first eight: that of the circuit it starts with, if unused."""
    looks: dict[str, dict[str, Any]] = {}
    for name in names:
        own = CIRCUIT_LOOKS.get(name.split(" ")[0])
        if own is not None and own not in looks.values():
            looks[name] = own
    others = itertools.cycle([look for look in LOOKS if look not in looks.values()])
    return {name: looks.get(name) or next(others) for name in names}


def temperature_label(key: str) -> str:
    """Title of a panel: "t1" -> "T=1 (sampling)"."""
    return "T=0 (greedy)" if key == "t0" else f"T={key.removeprefix('t')} (sampling)"


@contextmanager
def panels(rows: int, columns: int, size: tuple[float, float], **shared: Any) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure and its panels, row by row, drawn without a display; whatever style the caller has set stays."""
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.style.context(STYLE, after_reset=True):
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        yield figure, list(figure.subplots(rows, columns, squeeze=False, **shared).flat)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {kind: folder / f"{name}.{kind}" for kind in NO_DATES}
    for kind, file in files.items():
        figure.savefig(file, format=kind, metadata=NO_DATES[kind])
    return list(files.values())


def plot_loss(metrics: Sequence[Mapping[str, Any]], folder: Path, unit: str) -> list[Path]:
    """loss.png and loss.svg: the loss and expected tokens/step at T=1 over optimiser steps, one panel each.

    metrics: lines of metrics.jsonl (step, loss, tokens_per_step); long runs get a running mean. unit: of the loss.
    Returns the files written, none without a line.
    """
    if not metrics:
        return []
    steps = [line["step"] for line in metrics]
    shown = {"loss": f"loss ({unit})", "tokens_per_step": "tokens/step, T=1 (training data)"}
    with panels(1, 2, (7.2, 2.7)) as (figure, axes):
        for axis, (key, label) in zip(axes, shown.items(), strict=True):
            values = [line[key] for line in metrics]
            if len(values) < SMOOTHED_FROM:
                axis.plot(steps, values, color=LOSS_COLOUR, marker=".", markersize=3)
            else:
                width = len(values) // 20
                mean = running_mean(values, width)
                axis.plot(steps, values, color="#b8b8b8", linewidth=0.7, label="each line of the log")
                axis.plot(steps, mean, color=LOSS_COLOUR, linewidth=1.6, label=f"mean of the last {width}")
                axis.legend()
            axis.set(xlabel="optimiser steps", ylabel=label)
            axis.locator_params(axis="x", integer=True)
        return save(figure, folder, "loss")


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` values (fewer at the start); values that are not finite are left out."""
    means = []
    for end in range(1, len(values) + 1):
        last = [value for value in values[max(0, end - width) : end] if math.isfinite(value)]
        means.append(sum(last) / len(last) if last else math.nan)
    return means


def plot_acceptance(results: Mapping[str, Mapping[str, Mapping[str, Any]]], folder: Path) -> list[Path]:
    """acceptance.png and .svg: P(drafts 1 to k are all accepted), and tokens/step with k drafts at most, over k.

    results: name of a head -> {"t1": ..., "t0": ...}, each the fields of `vllm_mtpc.eval.metrics.Metrics`. Columns
    are temperatures, rows the two quantities; the legend gives the total with its standard error over sequences. A name
    that starts with a circuit's gets that circuit's colour. Returns the files written.
    """
    temperatures = [key for key in ("t1", "t0") if any(key in values for values in results.values())]
    if not temperatures:
        return []
    columns, looks = len(temperatures), looks_of(list(results))
    with panels(2, columns, (3.6 * columns, 5.0), sharex=True, sharey="row") as (figure, axes):
        for key, upper, lower in zip(temperatures, axes, axes[columns:], strict=False):
            for name, values in results.items():
                if key in values:
                    found, drawn = values[key], {**looks[name], "markersize": 4.5}
                    alive = list(found["per_position"])
                    total = f"{name}: {found['tokens_per_step']:.2f} ± {found['standard_error']:.2f}"
                    upper.plot(range(1, len(alive) + 1), alive, label=total, **drawn)
                    # Steps of fewer drafts are the same steps cut short: their tokens are the sum of what survives.
                    lower.plot(range(len(alive) + 1), list(itertools.accumulate([1.0, *alive])), **drawn)
            upper.set_title(temperature_label(key))
            upper.legend(title="tokens/step ± s.e.")
            lower.set_xlabel("drafts k")
            lower.locator_params(axis="x", integer=True)
        axes[0].set(ylabel="P(drafts 1 to k are all accepted)", ylim=(0, 1))
        axes[columns].set_ylabel("tokens/step with k drafts")
        axes[columns].set_ylim(bottom=1)
        return save(figure, folder, "acceptance")


class Point(NamedTuple):
    """A way of decoding, measured at batch 1."""

    label: str  # "btree r=8"; "plain" for decoding without drafts
    circuit: str | None  # None: plain decoding
    temperature: str  # "t1" or "t0"
    milliseconds: float  # of one step: the target's forward over its rows, and the draft
    tokens_per_step: float  # the target's own token included
    standard_error: float = 0.0
    forward_milliseconds: float = 0.0
    draft_milliseconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.tokens_per_step / self.milliseconds


def plot_frontier(points: Sequence[Point], folder: Path) -> list[Path]:
    """frontier.png and .svg: tokens/step over milliseconds of a step, one panel per temperature.

    Grey lines through the origin join what gives the same tokens/s; further up and further left is faster. Points of
    one circuit are joined. Returns the files written, none without a point.
    """
    found = {key: [point for point in points if point.temperature == key] for key in ("t1", "t0")}
    shown = {key: mine for key, mine in found.items() if mine}
    if not shown:
        return []
    right = 1.22 * max(point.milliseconds for point in points)
    left = max(0.0, min(point.milliseconds for point in points) - 0.18 * right)
    top = max(1.6, 1.15 * max(point.tokens_per_step for point in points))
    with panels(1, len(shown), (4.2 * len(shown), 3.6), sharey=True) as (figure, axes):
        for axis, (key, mine) in zip(axes, shown.items(), strict=True):
            axis.set(xlim=(left, right), ylim=(0.6, top))
            axis.set(title=temperature_label(key), xlabel="milliseconds of a step (batch 1)")
            _throughput_lines(axis, mine)
            _frontier_points(axis, mine)
        figure.draw_without_rendering()  # fixes the layout, which places of labels depend on
        for axis, mine in zip(axes, shown.values(), strict=True):
            _place_labels(axis, mine)
        axes[0].set_ylabel("tokens/step")
        return save(figure, folder, "frontier")


def _throughput_lines(axis: Axes, points: Sequence[Point]) -> None:
    from matplotlib.ticker import MaxNLocator

    rates = [point.tokens_per_second for point in points]
    (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    axis.grid(False)
    for rate in MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(0.8 * min(rates), 1.2 * max(rates)):
        if rate <= 0:
            continue
        axis.plot([0, right], [0, rate * right / 1000], color="#c4c4c4", linewidth=0.8, zorder=0.5)
        end = min(right, 1000 * top / rate)  # where the line leaves the panel
        height, turned = rate * end / 1000, math.degrees(math.atan(rate / 1000))
        if end > left and height > bottom:
            place = (-9, -5) if end < right else (-2, 1)
            how: dict[str, Any] = {"xytext": place, "textcoords": "offset points", "rotation": turned}
            axis.annotate(f"{rate:g} tok/s", (end, height), **how, **RATE_TEXT)


def _frontier_points(axis: Axes, points: Sequence[Point]) -> None:
    for circuit in dict.fromkeys(point.circuit for point in points):
        own = sorted((point for point in points if point.circuit == circuit), key=lambda point: point.milliseconds)
        look: dict[str, Any] = {**PLAIN, "linestyle": "none", "markersize": 9}
        if circuit is not None:
            look = {**CIRCUIT_LOOKS[circuit], "markersize": 6}
        errors = [0 if math.isnan(point.standard_error) else point.standard_error for point in own]
        milliseconds, tokens = [point.milliseconds for point in own], [point.tokens_per_step for point in own]
        axis.errorbar(milliseconds, tokens, yerr=errors, **look, linewidth=0.9, elinewidth=1.1)


def _place_labels(axis: Axes, points: Sequence[Point]) -> None:
    """Writes each label at the nearest place to its point that covers no label and no other point, joined by a line
    where that is not next to it."""
    from matplotlib.transforms import Bbox

    def overlap(one: Any, other: Any) -> float:
        shared = Bbox.intersection(one, other)
        return shared.width * shared.height if shared else 0.0

    canvas: Any = axis.figure.canvas  # Agg's
    renderer = canvas.get_renderer()
    scale = axis.figure.dpi / 72
    centres = [axis.transData.transform((point.milliseconds, point.tokens_per_step)) for point in points]
    reach = 4 * scale  # half a marker
    taken = [Bbox.from_bounds(x - reach, y - reach, 2 * reach, 2 * reach) for x, y in centres]
    taken += [text.get_window_extent(renderer) for text in axis.texts]
    for point, (x, y) in zip(points, centres, strict=True):
        at = (point.milliseconds, point.tokens_per_step)
        label = axis.annotate(point.label, at, xytext=(0, 0), textcoords="offset points", fontsize=8)
        size = label.get_window_extent(renderer).size
        label.remove()
        best: tuple[float, float, Any] | None = None
        for right, up in LABEL_PLACES:  # of the label's nearest corner, or of the middle of an edge
            left = x + right * scale - size[0] * (right < 0) - size[0] / 2 * (right == 0)
            box = Bbox.from_bounds(left, y + up * scale - size[1] * (up < 0), *size)
            hidden = sum(overlap(box, other) for other in taken) + size[0] * size[1] - overlap(box, axis.bbox)
            if best is None or hidden < best[0] - 1e-6:
                best = hidden, math.hypot(right, up), box
            if best[0] <= 1e-6:
                break
        assert best is not None  # there are places
        _, away, box = best
        place = ((box.x0 - x) / scale, (box.y0 - y) / scale)
        line = LABEL_LINE if away > BESIDE else None
        axis.annotate(point.label, at, xytext=place, textcoords="offset points", fontsize=8, arrowprops=line)
        taken.append(box)


def plot_served(rows: Sequence[Row], folder: Path, name: str) -> list[Path]:
    """`name`-latency and `name`-frontier, each .png and .svg, one pair per group of rows that may be compared.

    rows: of the result. Further groups get their name in the file's. Returns the files written.
    """
    groups = list(dict.fromkeys(row["group"] for row in rows))
    files = []
    for group in groups:
        mine = [row for row in rows if row["group"] == group]
        stem = name if group == groups[0] else f"{name}-{UNSAFE.sub('-', group).lower()}"
        files += plot_latency(mine, folder, f"{stem}-latency")
        files += plot_shares(mine, folder, f"{stem}-frontier")
    return files


def plot_latency(rows: Sequence[Row], folder: Path, name: str) -> list[Path]:
    """Throughput over time per token, a line per way of decoding along its numbers of clients, a panel per T.

    The time per token is TPOT where answers were streamed; else the time in which each request gains a token.
    """

    def draw(axis: Axes, decoding: str, mine: Sequence[Row], look: Mapping[str, Any]) -> None:
        mine = sorted(mine, key=lambda row: row["clients"])
        x = [row["tpot_ms"] or 1000 * row["clients"] / row["tokens_per_second"] for row in mine]
        y = [row["tokens_per_second"] for row in mine]
        axis.plot(x, y, **look, label=decoding)
        if decoding == "plain":
            how: dict[str, Any] = {"xytext": LABEL_PLACES[1], "textcoords": "offset points", "fontsize": 7}
            for row, *at in zip(mine, x, y, strict=True):
                axis.annotate(f"c={row['clients']}", (at[0], at[1]), **how)

    labels = ("milliseconds per token of a request", "tok/s of all requests")
    return _served_panels(rows, folder, name, draw, labels, logarithmic=True)


def plot_shares(rows: Sequence[Row], folder: Path, name: str) -> list[Path]:
    """Tokens/step over the draft's share of a step, at the fewest clients; nothing where steps were not timed."""
    fewest = min((row["clients"] for row in rows), default=0)
    timed = [row for row in rows if row["clients"] == fewest and row["draft_share"] is not None]

    def draw(axis: Axes, decoding: str, mine: Sequence[Row], look: Mapping[str, Any]) -> None:
        at = 100 * mine[0]["draft_share"], mine[0]["tokens_per_step"]
        axis.plot(*at, **{**look, "linestyle": "none"}, markersize=7, label=decoding)

    labels = (f"draft's share of a step, % (c={fewest})", "tokens/step")
    return _served_panels(timed, folder, name, draw, labels)


def _served_panels(
    rows: Sequence[Row],
    folder: Path,
    name: str,
    draw: Callable[[Axes, str, Sequence[Row], Mapping[str, Any]], None],
    labels: tuple[str, str],
    logarithmic: bool = False,
) -> list[Path]:
    """A panel per temperature; every way of decoding has one look in all of them."""
    from matplotlib.ticker import LogLocator, NullLocator

    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    decodings = list(dict.fromkeys(row["decoding"] for row in rows))
    if not temperatures:
        return []
    looks = looks_of([decoding for decoding in decodings if decoding != "plain"]) | {"plain": PLAIN}
    with panels(1, len(temperatures), (4.2 * len(temperatures), 3.6), sharey=True) as (figure, axes):
        for panel, temperature in zip(axes, temperatures, strict=True):
            for decoding in decodings:
                mine = [row for row in rows if (row["temperature"], row["decoding"]) == (temperature, decoding)]
                if mine:
                    draw(panel, decoding, mine, looks[decoding])
            panel.set(title=temperature_label(f"t{temperature:g}"), xlabel=labels[0])
            if logarithmic:  # with plain numbers at 1, 2 and 5
                panel.set(xscale="log", yscale="log")
                for axis in (panel.xaxis, panel.yaxis):
                    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
                    axis.set_minor_locator(NullLocator())
                    axis.set_major_formatter("{x:g}")
        axes[0].set_ylabel(labels[1])
        axes[0].legend()
        return save(figure, folder, name)
