"""Plots of a training run and of heads: loss, acceptance per position, tokens per step against latency."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mtpc.plots.style import CIRCUIT_LOOKS, PLAIN, Look, looks_of, panels, save, temperature_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHED_FROM = 40  # lines of metrics
BESIDE = 12  # points from a marker that a label needs no line for
LABEL_LINE = {"arrowstyle": "-", "color": "#8c8c8c", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}
LABEL_PLACES = [  # points from a marker, near ones first
    (round(away * math.cos(angle)), round(away * math.sin(angle)))
    for away in (7, 12, 20, 30, 42, 56, 72, 90)
    for angle in [math.radians(degrees) for degrees in (40, -40, 140, -140, 90, -90, 15, -15, 165, -165, 65, -65)]
]
LOSS_COLOUR = "#0072B2"


def plot_run(
    folder: Path, metrics: Sequence[Mapping[str, Any]], unit: str, name: str, results: Mapping[str, Mapping[str, Any]]
) -> None:
    """What a training run draws into its folder: the loss (in `unit`), and the acceptance of the head `name`."""
    plot_loss(metrics, folder, unit)
    plot_acceptance({name: results}, folder)


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
            colour = LOSS_COLOUR
            if len(values) < SMOOTHED_FROM:
                axis.plot(steps, values, color=colour, linewidth=1.4, marker=".", markersize=3)
            else:
                width = len(values) // 20
                axis.plot(steps, values, color="#b8b8b8", linewidth=0.7, label="each line of the log")
                mean = running_mean(values, width)
                axis.plot(steps, mean, color=colour, linewidth=1.6, label=f"mean of the last {width}")
                axis.legend(loc="best", fontsize=8)
            axis.set_xlabel("optimiser steps")
            axis.set_ylabel(label)
            axis.xaxis.get_major_locator().set_params(integer=True)
        return save(figure, folder, "loss")


def plot_acceptance(figures: Mapping[str, Mapping[str, Mapping[str, Any]]], folder: Path) -> list[Path]:
    """acceptance.png and .svg: P(drafts 1 to k are all accepted), and tokens/step with k drafts at most, over k.

    figures: name of a head -> {"t1": ..., "t0": ...}, each the fields of `vllm_mtpc.eval.metrics.Metrics`. Columns
    are temperatures, rows the two quantities; the legend gives the total with its standard error over sequences. A name
    that starts with a circuit's gets that circuit's colour. Returns the files written.
    """
    temperatures = [key for key in ("t1", "t0") if any(key in values for values in figures.values())]
    if not temperatures:
        return []
    with panels(2, len(temperatures), (3.6 * len(temperatures), 5.0), sharex=True, sharey="row") as (figure, axes):
        looks = looks_of(list(figures))
        for column, key in enumerate(temperatures):
            upper, lower = axes[column], axes[column + len(temperatures)]
            for name, values in figures.items():
                if key in values:
                    _acceptance_lines(upper, lower, name, values[key], looks[name])
            upper.set_title(temperature_label(key), fontsize=9)
            lower.set_xlabel("drafts k")
            lower.xaxis.get_major_locator().set_params(integer=True)
            upper.legend(title="tokens/step ± s.e.", title_fontsize=8, fontsize=8, loc="best")
        axes[0].set_ylabel("P(drafts 1 to k are all accepted)")
        axes[0].set_ylim(0, 1)
        axes[len(temperatures)].set_ylabel("tokens/step with k drafts")
        axes[len(temperatures)].set_ylim(bottom=1)
        return save(figure, folder, "acceptance")


def _acceptance_lines(upper: Axes, lower: Axes, name: str, values: Mapping[str, Any], look: Look) -> None:
    alive = list(values["per_position"])
    positions = range(1, len(alive) + 1)
    total = f"{name}: {values['tokens_per_step']:.2f} ± {values['standard_error']:.2f}"
    drawn = {"color": look.colour, "marker": look.marker, "linestyle": look.dashes, "linewidth": 1.4, "markersize": 4.5}
    upper.plot(positions, alive, label=total, **drawn)
    # Steps of fewer drafts are the same steps cut short: their tokens are the sum of what survives so far.
    lower.plot([0, *positions], [1.0, *(1 + part for part in itertools.accumulate(alive))], **drawn)


class Point(NamedTuple):
    """A way of decoding, measured at batch 1."""

    label: str  # "btree r=8"; "plain" for decoding without drafts
    circuit: str | None  # None: plain decoding
    temperature: str  # "t1" or "t0"
    milliseconds: float  # of one step: the target's forward over its rows, and the draft
    tokens_per_step: float  # the target's own token included
    standard_error: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return 1000 * self.tokens_per_step / self.milliseconds


def plot_frontier(points: Sequence[Point], folder: Path) -> list[Path]:
    """frontier.png and .svg: tokens/step over milliseconds of a step, one panel per temperature.

    Grey lines through the origin join what gives the same tokens/s; further up and further left is faster. Points of
    one circuit are joined. Returns the files written, none without a point.
    """
    temperatures = [key for key in ("t1", "t0") if any(point.temperature == key for point in points)]
    if not temperatures:
        return []
    with panels(1, len(temperatures), (4.2 * len(temperatures), 3.6), sharey=True) as (figure, axes):
        right = 1.22 * max(point.milliseconds for point in points)
        left = max(0.0, min(point.milliseconds for point in points) - 0.18 * right)
        top = 1.15 * max(point.tokens_per_step for point in points)
        for axis, key in zip(axes, temperatures, strict=True):
            chosen = [point for point in points if point.temperature == key]
            axis.set_xlim(left, right)
            axis.set_ylim(0.6, max(top, 1.6))
            axis.set_title(temperature_label(key), fontsize=9)
            axis.set_xlabel("milliseconds of a step (batch 1)")
            _throughput_lines(axis, chosen)
            _frontier_points(axis, chosen)
        figure.draw_without_rendering()  # fixes the layout, which places of labels depend on
        for axis, key in zip(axes, temperatures, strict=True):
            _place_labels(axis, [point for point in points if point.temperature == key])
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
        if end <= left or rate * end / 1000 <= bottom:
            continue
        axis.annotate(
            f"{rate:g} tok/s",
            (end, rate * end / 1000),
            xytext=(-9, -5) if end < right else (-2, 1),
            textcoords="offset points",
            rotation=math.degrees(math.atan(rate / 1000)),
            rotation_mode="anchor",
            transform_rotates_text=True,
            fontsize=7,
            color="#6e6e6e",
            ha="right",
            va="bottom",
        )


def _frontier_points(axis: Axes, points: Sequence[Point]) -> None:
    for circuit in dict.fromkeys(point.circuit for point in points):
        look = PLAIN if circuit is None else CIRCUIT_LOOKS[circuit]
        own = sorted((point for point in points if point.circuit == circuit), key=lambda point: point.milliseconds)
        milliseconds, tokens = [point.milliseconds for point in own], [point.tokens_per_step for point in own]
        axis.errorbar(
            milliseconds,
            tokens,
            yerr=[0 if math.isnan(point.standard_error) else point.standard_error for point in own],
            color=look.colour,
            marker=look.marker,
            markersize=9 if circuit is None else 6,
            linestyle="none" if circuit is None else look.dashes,
            linewidth=0.9,
            elinewidth=1.1,
        )


def _place_labels(axis: Axes, points: Sequence[Point]) -> None:
    """Writes each label at the nearest place to its point that covers no label and no other point, joined by a line
    where that is not beside it."""
    from matplotlib.transforms import Bbox

    renderer = axis.figure.canvas.get_renderer()
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
        best = None
        for right, up in LABEL_PLACES:  # of the label's nearest corner, or of the middle of an edge
            left = x + right * scale - size[0] * (right < 0) - size[0] / 2 * (right == 0)
            box = Bbox.from_bounds(left, y + up * scale - size[1] * (up < 0), *size)
            hidden = sum(_overlap(box, other) for other in taken) + size.prod() - _overlap(box, axis.bbox)
            if best is None or hidden < best[0] - 1e-6:
                best = hidden, math.hypot(right, up), box
            if best[0] <= 1e-6:
                break
        _, away, box = best
        place = ((box.x0 - x) / scale, (box.y0 - y) / scale)
        line = LABEL_LINE if away > BESIDE else None
        axis.annotate(point.label, at, xytext=place, textcoords="offset points", fontsize=8, arrowprops=line)
        taken.append(box)


def _overlap(one: Any, other: Any) -> float:
    """Area that two boxes share."""
    wide, high = min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)
    return max(0.0, wide) * max(0.0, high)


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the last `width` values (fewer at the start); values that are not finite are left out."""
    means = []
    for end in range(1, len(values) + 1):
        last = [value for value in values[max(0, end - width) : end] if math.isfinite(value)]
        means.append(sum(last) / len(last) if last else math.nan)
    return means
