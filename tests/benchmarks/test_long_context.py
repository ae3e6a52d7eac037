"""Drafts behind long texts: how the target is stretched, what is asked, what is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import long_context
from vllm_mtpc import demo
from vllm_mtpc.errors import UsageError

TARGET = str(demo.path("target"))


def test_positions_are_stretched_only_where_they_end() -> None:
    assert "hf_overrides" not in long_context.engine(TARGET, 500)
    far = long_context.engine(TARGET, 8000)
    rope = far["hf_overrides"]["rope_parameters"]
    assert far["max_model_len"] >= 8000 + long_context.LENGTH
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 8.0, 1024)
    assert far["hf_overrides"]["max_position_embeddings"] >= far["max_model_len"]


def test_texts_are_as_long_as_asked() -> None:
    found = long_context.texts(TARGET, 3000, 4)
    assert [len(text) for text in found] == [3000] * 4 and len({tuple(text) for text in found}) == 4
    with pytest.raises(UsageError, match="--positions 10000000: 0 texts"):
        long_context.texts(TARGET, 10_000_000, 1)


def test_the_figure(tmp_path: Path) -> None:
    rows = [
        {"positions": at, "temperature": t, "head": head, "tokens_per_step": 1.5, "step_ms": 2.0, "draft_ms": 0.5}
        for at in (10, 100)
        for t in (0.0, 1.0)
        for head in ("plain", "btree")
    ]
    files = long_context.draw(rows, tmp_path / "figure.svg")
    assert {file.suffix for file in files} == {".png", ".svg"} and all(file.stat().st_size > 1000 for file in files)


@pytest.mark.slow
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--positions", "40", "1100", "--texts", "1", "--heads", str(demo.path("btree")), "--temperatures", "0"]
    assert long_context.main([*words, "--json", str(tmp_path / "found.json")]) == 0
    assert "| 1100 | 0.0 | btree |" in capsys.readouterr().out
