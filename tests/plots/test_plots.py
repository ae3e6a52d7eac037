"""Figures show the right numbers, and the same numbers give the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from vllm_mtpc.plots import draw

RESULTS = {
    "t1": {"tokens_per_step": 1.75, "standard_error": 0.25, "per_position": [0.5, 0.25]},
    "t0": {"tokens_per_step": 2.5, "standard_error": 0.125, "per_position": [0.8, 0.7]},
}
METRICS = [{"step": 10 * i, "loss": 3.0 / i, "tokens_per_step": 1 + i / 10} for i in range(1, 11)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list:
    """Figures that are saved, each once."""
    figures, save = [], Figure.savefig

    def savefig(figure: Figure, *args: Any, **options: Any) -> None:
        figures.extend([figure] if figure not in figures else [])
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", savefig)
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


def test_files_are_the_same_every_time(tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "other"):
        draw.plot_loss(METRICS, folder, "nats")
        draw.plot_acceptance({"cp": RESULTS}, folder)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes(), file.name
