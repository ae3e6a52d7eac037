"""Plots of results of `bench serve`: the right numbers, groups apart, and files that are no results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_mtpc import cli
from vllm_mtpc.bench.decodings import OWN, V2_INTERPRETED
from vllm_mtpc.plots import draw
from vllm_mtpc.plots.draw import CIRCUIT_LOOKS, plot_latency, plot_served, plot_shares


def row(decoding: str, temperature: float, clients: int, rate: float, **more: object) -> dict:
    values = {"tpot_ms": None, "draft_share": 0.25, "tokens_per_step": 2.0, "group": OWN}
    own = {"decoding": decoding, "temperature": temperature, "clients": clients, "tokens_per_second": rate}
    return {**values, **own, **more}


ROWS = [
    row("plain", 1.0, 1, 100.0, draft_share=0.0, tokens_per_step=1.0),
    row("btree", 1.0, 4, 400.0),
    row("btree", 1.0, 1, 200.0),
    row("plain", 0.0, 1, 125.0, draft_share=0.0, tokens_per_step=1.0),
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """Figures as they are when they are saved."""
    figures, save = [], draw.save
    monkeypatch.setattr(draw, "save", lambda figure, *rest: figures.append(figure) or save(figure, *rest))
    return figures


def test_throughput_over_the_time_of_a_token(tmp_path: Path, drawn: list) -> None:
    files = plot_latency(ROWS, tmp_path, "x")
    assert {file.name for file in files} == {"x.png", "x.svg"}
    sampled, greedy = drawn[0].axes
    lines = {line.get_label(): line for line in sampled.lines}
    assert list(lines["btree"].get_xdata()) == [5.0, 10.0] and list(lines["btree"].get_ydata()) == [200.0, 400.0]
    assert lines["btree"].get_color() == CIRCUIT_LOOKS["btree"]["color"] != lines["plain"].get_color()
    assert [line.get_label() for line in greedy.lines] == ["plain"] and list(greedy.lines[0].get_xdata()) == [8.0]


def test_a_streamed_time_per_token_is_used_as_it_is(tmp_path: Path, drawn: list) -> None:
    plot_latency([row("plain", 1.0, 4, 400.0, tpot_ms=7.5)], tmp_path, "x")
    assert list(drawn[0].axes[0].lines[0].get_xdata()) == [7.5]


def test_shares_are_of_the_fewest_clients_and_of_timed_steps(tmp_path: Path, drawn: list) -> None:
    plot_shares(ROWS, tmp_path, "x")
    points = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in drawn[0].axes[0].lines}
    assert points == {"plain": (0.0, 1.0), "btree": (25.0, 2.0)}
    assert plot_shares([row("btree", 1.0, 1, 10.0, draft_share=None)], tmp_path, "y") == []


def test_groups_have_files_of_their_own(tmp_path: Path) -> None:
    files = plot_served([*ROWS, row("plain", 1.0, 1, 9.0, group=V2_INTERPRETED)], tmp_path, "r")
    stems = {file.stem for file in files}
    assert stems == {"r-latency", "r-frontier", "r-v2-interpreted-latency", "r-v2-interpreted-frontier"}


def test_files_that_are_no_results_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"kind": "draft", "rows": []}))
    assert cli.main(["plot", str(tmp_path / "other.json")]) == 1
    assert "not a result of vllm-mtpc bench serve" in capsys.readouterr().err
    assert cli.main(["plot", str(tmp_path / "none.json")]) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert cli.main(["plot", str(tmp_path / "head")]) == 1
    assert "--out is missing" in capsys.readouterr().err
