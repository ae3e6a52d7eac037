"""Prompts of every form, as token ids of the demo target: a token per byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_mtpc import demo
from vllm_mtpc.data.prompts import load, spread
from vllm_mtpc.errors import UsageError

TARGET = str(demo.path("target"))


def loaded(data: list[Path] | list[str], count: int = 8, length: int = 10, longest: int = 100) -> list[str]:
    """The prompts as text; ids above 255 (begin of text) left out."""
    found = load([str(file) for file in data], TARGET, count, length, longest)
    return [bytes(token for token in prompt if token < 256).decode() for prompt in found]


def write(file: Path, *records: dict) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def test_prompts_of_every_form_of_a_line(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "first"}, {"role": "assistant", "content": "answer"}]
    records = [
        {"question_id": 81, "category": "writing", "turns": ["Spec-Bench", "second turn"]},
        {"prompt": "a prompt"},
        {"prompt_ids": list(b"as ids")},
        {"messages": talk},
        {"messages": [*talk, {"role": "user", "content": "last"}]},
    ]
    assert loaded([write(tmp_path / "d.jsonl", *records)]) == ["Spec-Bench", "a prompt", "as ids", "first", "last"]


def test_text_prompts_are_spread_over_the_text(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("0123456789abcdefghijKLMNOPQRSTuvwxyz....")
    pieces = loaded([tmp_path / "t.txt"], count=2)
    assert len(pieces) == 2 and all(len(piece) >= 9 for piece in pieces)  # one place may be begin of text
    assert pieces[0].startswith("012345678") and "KLMNOP" in pieces[1]
    assert pieces == loaded([tmp_path / "t.txt"], count=2)


def test_prompts_are_thinned_out_evenly(tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", *({"prompt_ids": [index] * (index + 1)} for index in range(10)))
    assert [len(prompt) for prompt in load([str(file)], TARGET, 3, 10, 6)] == [1, 3, 5]
    assert spread(list("abc"), 9) == list("abc") and spread(list("abcdefgh"), 4) == list("aceg")


def test_demo_has_prompts() -> None:
    found = loaded([], count=4, longest=300)
    assert len(found) == 4 and all("def " in text or "class " in text for text in found)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "longer than three"}, "none of 1 to 3 tokens"),
        ({"other": 1}, "jsonl:1: keys other"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "needs a turn with text"),
        (None, "no such file"),
    ],
)
def test_data_without_prompts_is_refused(tmp_path: Path, record: dict | None, message: str) -> None:
    if record:
        write(tmp_path / "d.jsonl", record)
    with pytest.raises(UsageError, match=message):
        loaded([tmp_path / "d.jsonl"], longest=3)
