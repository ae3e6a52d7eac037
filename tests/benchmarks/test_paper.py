"""The papers' claims: the documents show the result files and the published numbers, verdicts follow from errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.paper import __main__ as command
from benchmarks.paper import frame
from benchmarks.paper.findings import Claim, Difference


@pytest.mark.parametrize("file", command.DOCUMENTS, ids=lambda file: file.name)
def test_document_is_that_of_the_result_files_and_the_published_numbers(file: Path) -> None:
    written = file.read_text(encoding="utf-8")
    assert command.DOCUMENTS[file](command.TABLES, written) == written, "type: python -m benchmarks.paper --write"


def test_each_published_table_is_shown_once() -> None:
    shown = [table.published for tables in command.TABLES.values() for table in tables if table.published]
    assert sorted(shown) == sorted(frame.published())


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([(0.3, 0.1), (0.5, 0.2)], "holds"),
        ([(0.3, 0.1), (0.1, 0.1)], "within noise"),
        ([(0.3, 0.1), (-0.3, 0.1)], "does not hold"),
        ([(0.3, None), (0.1, 0.1)], "true of these rows"),
        ([(0.3, None), (-0.1, 0.1)], "not true of these rows"),
    ],
)
def test_verdict_follows_from_the_errors(differences: list[tuple[float, float | None]], verdict: str) -> None:
    assert Claim("a", [Difference(*one) for one in differences]).verdict == verdict
