"""Figures show the right numbers, the same numbers give the same files, and other files are refused."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import pytest

from vllm_mtpc import demo
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.plots import command, draw

RESULTS = {
    "t1": {"tokens_per_step": 1.75, "standard_error": 0.25, "per_position": [0.5, 0.25]},
    "t0": {"tokens_per_step": 2.5, "standard_error": 0.125, "per_position": [0.8, 0.7]},
}
METRICS = [{"step": 10 * i, "loss": 3.0 / i, "tokens_per_step": 1 + i / 10} for i in range(1, 11)]


def row(decoding: str, temperature: float, clients: int, rate: float, **more: object) -> dict:
    values = {"decoding": decoding, "temperature": temperature, "clients": clients, "tokens_per_second": rate}
    return {"tpot_ms": None, **values, **more}


ROWS = [
    row("plain", 1.0, 1, 100.0),
    row("btree", 1.0, 4, 400.0),
    row("btree", 1.0, 1, 200.0),
    row("plain", 0, 1, 125.0),
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """Figures in the state in which they are saved."""
    figures, save = [], draw.save
    monkeypatch.setattr(draw, "save", lambda figure, *rest: figures.append(figure) or save(figure, *rest))
    return figures


def test_loss_is_drawn_over_steps(tmp_path: Path, drawn: list) -> None:
    assert draw.plot_loss([], tmp_path, "nats") == [] and not list(tmp_path.iterdir())
    assert {file.name for file in draw.plot_loss(METRICS, tmp_path, "nats")} == {"loss.png", "loss.svg"}
    assert drawn[0].axes[0].get_ylabel() == "loss (nats)"
    loss, tokens = (axis.lines[0] for axis in drawn[0].axes)
    assert (loss.get_xdata()[-1], loss.get_ydata()[-1], tokens.get_ydata()[-1]) == (100, 0.3, 2.0)


def test_acceptance_is_drawn_by_position_and_temperature(tmp_path: Path, drawn: list) -> None:
    assert draw.plot_acceptance({}, tmp_path) == []
    draw.plot_acceptance({"ff": RESULTS, "btree": RESULTS}, tmp_path)
    sampled, greedy = drawn[0].axes
    assert list(sampled.lines[0].get_ydata()) == [0.5, 0.25] and list(greedy.lines[1].get_ydata()) == [0.8, 0.7]
    assert [text.get_text() for text in sampled.get_legend().get_texts()] == ["ff: 1.75 ± 0.25", "btree: 1.75 ± 0.25"]
    draw.plot_acceptance({"ff": {"t0": RESULTS["t0"]}}, tmp_path)
    assert [axis.get_title() for axis in drawn[1].axes] == ["T=0 (greedy)"]


def test_throughput_is_drawn_against_time_per_token(tmp_path: Path, drawn: list) -> None:
    rows = [*ROWS, row("plain", 0, 4, 400.0, tpot_ms=7.5), row("plain", 1.0, 1, 9.0, group="V2, interpreted")]
    files = draw.plot_served(rows, tmp_path, "x")
    assert {file.stem for file in files} == {"x-latency", "x-v2-interpreted-latency"}  # a file for each group
    sampled, greedy = drawn[0].axes
    lines = {line.get_label(): line for line in sampled.lines}
    assert list(lines["btree"].get_xdata()) == [5.0, 10.0] and list(lines["btree"].get_ydata()) == [200.0, 400.0]
    assert lines["btree"].get_color() == draw.CIRCUIT_LOOKS["btree"]["color"] != lines["plain"].get_color()
    assert list(greedy.lines[0].get_xdata()) == [8.0, 7.5]  # a streamed time per token is used unchanged


def test_files_are_the_same_every_time(tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "other"):
        draw.plot_loss(METRICS, folder, "nats")
        draw.plot_acceptance({"cp": RESULTS}, folder)
        draw.plot_served(ROWS, folder, "x")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes(), file.name


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(list(words)))


def test_command_draws_heads_and_results(tmp_path: Path, drawn: list) -> None:
    assert run(*(str(demo.path(name)) for name in ("ff", "btree")), "--out", str(tmp_path / "out")) == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"acceptance.png", "acceptance.svg"}
    figures = json.loads((demo.path("btree") / "provenance.json").read_text())["figures"]
    assert list(drawn[0].axes[0].lines[1].get_ydata()) == figures["t1"]["per_position"]
    (tmp_path / "r.json").write_text(json.dumps({"kind": "bench serve", "rows": ROWS}))
    assert run(str(tmp_path / "r.json")) == 0 and (tmp_path / "r-latency.svg").is_file()


WORDS = {"tokens_per_step": "many", "standard_error": 0, "per_position": []}


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("other.json", {"kind": "draft", "rows": []}, "not a result of vllm-mtpc bench serve"),
        ("none.json", None, "cannot be read"),
        ("head", None, "--out is missing"),
        ("ff/provenance.json", {"figures": {}}, "holds no figures"),
        ("ff/provenance.json", {"figures": {"t1": WORDS}}, "holds no figures"),
    ],
)
def test_files_without_results_are_refused(tmp_path: Path, file: str, content: object, message: str) -> None:
    shutil.copytree(demo.path("ff"), tmp_path / "ff")
    if content:
        (tmp_path / file).write_text(json.dumps(content))
    words = [str(tmp_path / "ff"), "--out", str(tmp_path)] if file.startswith("ff") else [str(tmp_path / file)]
    with pytest.raises(MtpcError, match=message):
        run(*words)
