"""Plots: the right numbers are drawn, the same numbers give the same files, and heads are compared fairly."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
from pathlib import Path

import matplotlib.colors
import pytest
from matplotlib.text import Text

from vllm_mtpc import demo
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.plots import command as plot_command
from vllm_mtpc.plots import draw as plots
from vllm_mtpc.plots.draw import (
    CIRCUIT_LOOKS,
    Point,
    looks_of,
    plot_acceptance,
    plot_frontier,
    plot_loss,
    running_mean,
)
from vllm_mtpc.train.options import parse

FIGURES = {
    "t1": {"tokens_per_step": 1.75, "standard_error": 0.25, "per_position": [0.5, 0.25]},
    "t0": {"tokens_per_step": 2.5, "standard_error": 0.125, "per_position": [0.8, 0.7]},
}
POINTS = [
    Point("plain", None, "t1", 4.0, 1.0),
    Point("cp r=8", "cp", "t1", 5.0, 2.0, 0.1),
    Point("cp r=32", "cp", "t1", 5.1, 2.05, 0.1),
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """Figures as they are when they are saved."""
    figures, save = [], plots.save
    monkeypatch.setattr(plots, "save", lambda figure, *rest: figures.append(figure) or save(figure, *rest))
    return figures


def metrics(lines: int) -> list[dict]:
    return [{"step": 10 * i, "loss": 3.0 / i, "tokens_per_step": 1 + i / lines} for i in range(1, lines + 1)]


@pytest.mark.parametrize("lines", [3, 100])
def test_loss_is_drawn_over_steps(tmp_path: Path, drawn: list, lines: int) -> None:
    files = plot_loss(metrics(lines), tmp_path, "nats per token")
    assert {file.name for file in files} == {"loss.png", "loss.svg"} and all(file.stat().st_size for file in files)
    loss, tokens = drawn[0].axes
    assert loss.lines[0].get_xdata()[-1] == 10 * lines and loss.lines[0].get_ydata()[-1] == 3.0 / lines
    assert tokens.lines[0].get_ydata()[-1] == 2.0
    assert len(loss.lines) == (2 if lines == 100 else 1)  # long runs also get a mean


def test_nothing_to_draw_writes_nothing(tmp_path: Path) -> None:
    assert plot_loss([], tmp_path, "nats") == plot_acceptance({}, tmp_path) == plot_frontier([], tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_a_running_mean_is_of_the_past_and_leaves_out_what_is_no_number() -> None:
    assert running_mean([1.0, 3.0, 8.0, math.nan], 2) == [1.0, 2.0, 5.5, 8.0]


def test_acceptance_draws_each_position_and_sums_to_the_total(tmp_path: Path, drawn: list) -> None:
    files = plot_acceptance({"ff": FIGURES, "btree": FIGURES}, tmp_path)
    assert {file.name for file in files} == {"acceptance.png", "acceptance.svg"}
    sampled, greedy, sampled_sum, greedy_sum = drawn[0].axes
    assert list(sampled.lines[0].get_ydata()) == [0.5, 0.25] and list(greedy.lines[1].get_ydata()) == [0.8, 0.7]
    assert list(sampled_sum.lines[0].get_ydata()) == [1.0, 1.5, 1.75]
    assert list(greedy_sum.lines[0].get_ydata()) == pytest.approx([1.0, 1.8, 2.5])
    assert [text.get_text() for text in sampled.get_legend().get_texts()] == ["ff: 1.75 ± 0.25", "btree: 1.75 ± 0.25"]


def test_one_temperature_gives_one_column(tmp_path: Path, drawn: list) -> None:
    plot_acceptance({"ff": {"t0": FIGURES["t0"]}}, tmp_path)
    assert [axis.get_title() for axis in drawn[0].axes] == ["T=0 (greedy)", ""]


def test_frontier_has_the_points_and_lines_of_equal_throughput(tmp_path: Path, drawn: list) -> None:
    plot_frontier(POINTS, tmp_path)
    axis = drawn[0].axes[0]
    texts = {text.get_text() for text in axis.texts}
    assert {"plain", "cp r=8", "cp r=32"} <= texts
    rates = [line for line in axis.lines if line.get_color() == "#c4c4c4"]
    labels = [text for text in texts if text.endswith(" tok/s")]
    assert len(rates) >= 3 and labels
    for line in rates:  # through the origin; its slope is one of the rates: tokens/step = tokens/s * ms / 1000
        (x0, x1), (y0, y1) = line.get_xdata(), line.get_ydata()
        assert (x0, y0) == (0, 0) and 1000 * y1 / x1 == pytest.approx(round(1000 * y1 / x1, 1))
    assert POINTS[1].tokens_per_second == 400


def test_labels_of_close_points_do_not_cover_each_other(tmp_path: Path, drawn: list) -> None:
    plot_frontier(POINTS, tmp_path)
    figure = drawn[0]
    own = [text for text in figure.axes[0].texts if text.get_text().startswith("cp")]
    boxes = [text.get_window_extent(figure.canvas.get_renderer()) for text in own]
    assert len(boxes) == 2 and not boxes[0].overlaps(boxes[1])


def test_labels_of_many_heads_cover_neither_each_other_nor_a_point(tmp_path: Path, drawn: list) -> None:
    """Twelve heads whose points all but coincide: each label is whole, inside its panel and readable."""
    heads = [(f"{name} n={n}", name) for name in ("ff", "cp", "hmm", "btree") for n in (4, 8, 16)]
    close = [Point(label, name, "t1", 5 + 0.02 * k, 2 + 0.03 * (k % 5)) for k, (label, name) in enumerate(heads)]
    plot_frontier([POINTS[0], *close], tmp_path)
    axis = drawn[0].axes[0]
    drawn[0].draw_without_rendering()  # what was saved has another resolution
    renderer = drawn[0].canvas.get_renderer()
    labels = [text for text in axis.texts if " n=" in text.get_text()]
    boxes = [Text.get_window_extent(text, renderer) for text in labels]  # without the line to the point
    assert len(boxes) == 12
    for one, other in itertools.combinations(boxes, 2):
        assert not one.overlaps(other)
    for box in boxes:
        assert axis.bbox.x0 <= box.x0 and box.x1 <= axis.bbox.x1 and axis.bbox.y0 <= box.y0 and box.y1 <= axis.bbox.y1
        assert not any(box.contains(*axis.transData.transform((p.milliseconds, p.tokens_per_step))) for p in close)


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        ({}, "90 % total variation, the rest nats"),  # the default
        ({"acceptance": 1}, "total variation"),
        ({"acceptance": 0}, "nats per token"),
        ({"acceptance_form": "log"}, "nats per token"),
        ({"acceptance": 1, "acceptance_form": "length"}, "-accepted / (n - 1)"),
        ({"head": "ptp"}, "nats per token"),
    ],
)
def test_the_axis_says_what_the_loss_counts(tmp_path: Path, drawn: list, values: dict, unit: str) -> None:
    options = parse({"target": "t", "data": ["d"], "out": tmp_path, **values})
    plot_loss(metrics(3), tmp_path, options.job.loss_unit(options))
    assert drawn[0].axes[0].get_ylabel() == f"loss ({unit})"


def test_files_are_the_same_every_time(tmp_path: Path) -> None:
    for folder in ("one", "other"):
        plot_loss(metrics(50), tmp_path / folder, "nats")
        plot_acceptance({"cp": FIGURES}, tmp_path / folder)
        plot_frontier(POINTS, tmp_path / folder)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes(), file.name


def test_looks_differ_also_in_greyscale() -> None:
    names = ["btree n=8", "btree n=16", "cp", "something", "ff", "hmm", "more", "most"]
    looks = looks_of(names)
    assert looks["btree n=8"] == CIRCUIT_LOOKS["btree"] and looks["ff"] == CIRCUIT_LOOKS["ff"]
    for part in ("color", "marker", "linestyle"):
        assert len({str(look[part]) for look in looks.values()}) == len(names)
    assert all(matplotlib.colors.is_color_like(look["color"]) for look in looks.values())


def command(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plot_command.add_arguments(parser)
    return parser.parse_args(["--repeats", "2", "--device", "cpu", *words])


def copy_of(name: str, to: Path, **figures: object) -> Path:
    """A demo head with other figures in its provenance."""
    shutil.copytree(demo.path(name), to / name)
    (to / name / "provenance.json").write_text(json.dumps({"figures": figures}))
    return to / name


def test_the_command_measures_heads_and_writes_all_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "plots"
    assert plot_command.run(command(str(demo.path("ff")), str(demo.path("btree")), "--out", str(out))) == 0
    names = {"frontier.json", *(f"{name}.{kind}" for name in ("acceptance", "frontier") for kind in ("png", "svg"))}
    assert {file.name for file in out.iterdir()} == names
    result = json.loads((out / "frontier.json").read_text())
    assert [row["label"] for row in result["rows"]] == ["plain"] * 2 + ["ff r=1"] * 2 + ["btree r=8"] * 2
    assert result["how"]["threads"] >= 1 and result["how"]["batch"] == 1
    figures = json.loads((demo.path("btree") / "provenance.json").read_text())["figures"]
    for row in result["rows"]:
        parts = row["forward_milliseconds"] + row["draft_milliseconds"]
        assert row["milliseconds"] == pytest.approx(parts, abs=1e-3) and row["forward_milliseconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(1000 * row["tokens_per_step"] / row["milliseconds"], rel=1e-3)
        assert (row["draft_milliseconds"] > 0) == (row["label"] != "plain")
        if row["label"].startswith("btree"):
            assert row["tokens_per_step"] == figures[row["temperature"]]["tokens_per_step"]
    assert "btree r=8" in capsys.readouterr().out


def test_heads_are_told_apart_by_what_differs() -> None:
    first, other = (plot_command.read(str(demo.path(name))) for name in ("cp", "btree"))
    assert plot_command.labels_of([first, other]) == ["cp r=8", "btree r=8"]
    wider = plot_command.Measured(other.folder, other.config.model_copy(update={"window": 16}), {})
    assert plot_command.labels_of([other, wider]) == ["btree n=8 r=8", "btree n=16 r=8"]
    moved = plot_command.Measured(other.folder.parent / "again", other.config, {})
    assert plot_command.labels_of([other, moved]) == ["btree btree", "btree again"]
    with pytest.raises(plot_command.UsageError, match="twice"):
        plot_command.labels_of([other, other])


@pytest.mark.parametrize("figures", [{}, {"t1": {"tokens_per_step": "many", "standard_error": 0, "per_position": []}}])
def test_a_head_without_figures_is_refused(tmp_path: Path, figures: dict) -> None:
    with pytest.raises(plot_command.UsageError, match="holds no figures"):
        plot_command.run(command(str(copy_of("ff", tmp_path, **figures)), "--out", str(tmp_path / "plots")))
    assert not (tmp_path / "plots").exists()


def test_heads_of_two_targets_are_refused(tmp_path: Path) -> None:
    other = copy_of("ff", tmp_path, **FIGURES)
    (tmp_path / "target").mkdir()  # where its relative path leads now
    with pytest.raises(plot_command.UsageError, match="different targets"):
        plot_command.run(command(str(demo.path("cp")), str(other), "--out", str(tmp_path)))


def test_wrong_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(plot_command.UsageError, match="--repeats 0"):
        plot_command.run(command(str(demo.path("cp")), "--out", str(tmp_path), "--repeats", "0"))
    with pytest.raises(CheckpointError):
        plot_command.run(command(str(tmp_path / "none"), "--out", str(tmp_path)))
