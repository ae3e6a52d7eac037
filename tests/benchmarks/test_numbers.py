"""Numbers of README.md, docs and RESULTS.md are those of their files."""

from __future__ import annotations

import pytest

from benchmarks import numbers
from benchmarks.numbers import BLOCK, PAGES, VALUE
from vllm_mtpc.engine.provenance import ROOT


@pytest.mark.parametrize("page", PAGES)
def test_numbers_are_those_of_their_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert numbers.fill(text) == text, "type: python -m benchmarks.numbers"
    marked = len(BLOCK.findall(text)) + len(VALUE.findall(text))
    assert text.count("<!-- end -->") == marked, "a marker is not as benchmarks/numbers.py says"
