"""Numbers of README.md, docs and RESULTS.md are those of their files, and none is written by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import numbers
from benchmarks.numbers import BLOCK, PAGES, VALUE

ROOT = Path(__file__).parents[2]
MEASURED = re.compile(r"\d ?± ?\d|\d+\.\d+x\b|\d+\.\d+ (?:and \d+\.\d+ )?tokens/step|[\d,]+ of [\d,]+\b|\d ms\b")
PAPERS = re.compile(r"<!-- (mtpc|ptp): written.*?<!-- \1: end[^>]*-->", re.DOTALL)  # see test_paper.py
OTHERS = re.compile("goal|paper|log line", re.IGNORECASE)  # what a paragraph with other numbers names


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_their_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert numbers.fill(text) == text, "type: python -m benchmarks.numbers"
    marked = len(BLOCK.findall(text)) + len(VALUE.findall(text))
    assert text.count("<!-- end -->") == marked, "a marker is not as benchmarks/numbers.py says"


def test_falsified_numbers_are_found() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    for marked in (BLOCK, VALUE):
        falsified = marked.sub(lambda found: f"{found[1]}1{found.groups()[-1]}", text)
        assert falsified != text and numbers.fill(falsified) == text


@pytest.mark.parametrize("page", PAGES)
def test_no_measured_number_is_written_by_hand(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for generated in (re.compile("```.*?```", re.DOTALL), PAPERS, BLOCK, VALUE):
        text = generated.sub("", text)
    parts = [part for part in re.split(r"\n\n|\n(?=[*|])", text) if MEASURED.search(part) and not OTHERS.search(part)]
    assert not parts, "give the file of the number, as benchmarks/numbers.py says"
