"""Kept runs: a run replaces what it ran again, and the list shows what is proven, failed, skipped or was never run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import claims
from tests.support.outcome import CELL, Outcome, as_text

FILE = "tests/test_claims.py::test_list_shows_how_each_test_last_ended"
OTHER = "tests/test_claims.py::test_run_replaces_what_it_ran_again"


def report(test: str, outcome: str = "passed", cell: list[str] | None = None, keywords: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        nodeid=test, outcome=outcome, passed=outcome == "passed", skipped=outcome == "skipped", duration=1.0,
        keywords=keywords, user_properties=[(CELL, cell)] if cell else [], longrepr=("", 0, "Skipped: no GPU"),
    )  # fmt: skip


def run(before: dict[str, Any], day: str, *reports: Any) -> dict[str, Any]:
    """The content of a file after a run."""
    found = Outcome(Path("unused"))
    found.source |= {"time": f"{day}T00:00", "commit": f"{day[-2:]}{'0' * 38}"}
    for one in reports:
        found.pytest_runtest_logreport(one)
    return json.loads(as_text(found.as_json(before)))


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    """Two runs; the second one of a slow case alone."""
    cell = ["top_k", "mtpc on V1", "exact", ""]
    gone, cases = report("tests/test_claims.py::test_that_was_removed", cell=cell), [f"{FILE}[1]", f"{FILE}[2]"]
    first = run({}, "2026-01-01", gone, report(OTHER, "skipped"), *(report(case, cell=cell) for case in cases))
    return run(first, "2026-01-02", report(f"{FILE}[3]", "failed", cell, keywords=("slow",)))


def test_run_replaces_what_it_ran_again(kept: dict[str, Any]) -> None:
    assert kept["tests"].keys() == {FILE, OTHER}  # the one that was removed is left out
    assert kept["tests"][FILE]["fast"]["passed"] == 2 and kept["tests"][FILE]["fast"]["day"] == "2026-01-01"
    (cell,) = kept["cells"]
    assert (cell["passed"], cell["failed"], cell["day"]) == (0, 1, "2026-01-02")


def test_list_shows_how_each_test_last_ended(
    kept: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "KEPT", tmp_path / "kept.json")
    claims.KEPT.write_text(json.dumps(kept), encoding="utf-8")
    shown = "\n".join(claims.lines("claims.py"))
    assert "last ended: 2 passed 2026-01-01 at 010000000, 1 FAILED 2026-01-02 at 020000000 (slow)" in shown
    assert "ran again: skipped 2026-01-01 at 010000000: no GPU" in shown
    assert "in no kept run" in "\n".join(claims.lines("test_files.py"))
