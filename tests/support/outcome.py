"""`pytest --outcome=FILE`: what a run found, kept as JSON.

It is the source of benchmarks/FEATURES.md (tests/support/features.py), and of the order of files in which workers take
them (tests/conftest.py).
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.features import KEPT
from vllm_mtpc.engine import provenance

CELL = "feature"  # name of the property of a test that carries a cell of the feature page


class Outcome:
    """The plugin that writes FILE; on the controller alone, where workers run the tests."""

    def __init__(self, file: Path) -> None:
        self.file, self.source, self.start = file, provenance.collect(), time.monotonic()
        self.reports: dict[str, list[pytest.TestReport]] = defaultdict(list)  # of a test's setup, call and teardown

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports[report.nodeid].append(report)

    def pytest_sessionfinish(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        results: dict[str, list[str]] = {"passed": [], "failed": []}
        reasons: dict[str, list[str]] = defaultdict(list)  # of skips
        seconds: dict[str, dict[str, float]] = defaultdict(lambda: {"fast": 0.0, "slow": 0.0})
        cells: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
        for test, reports in sorted(self.reports.items()):
            ended = next((one for one in reports if not one.passed), reports[0])
            seconds[test.partition("::")[0]]["slow" if "slow" in ended.keywords else "fast"] += sum(
                one.duration for one in reports
            )
            if ended.skipped:
                reason = ended.longrepr[2] if isinstance(ended.longrepr, tuple) else str(ended.longrepr)
                reasons[reason.removeprefix("Skipped: ")].append(test)
            else:
                results[ended.outcome].append(test)
            for _, cell in (own for own in ended.user_properties if own[0] == CELL):
                cells[(*cell, test.partition("[")[0].removeprefix("tests/"))][ended.outcome] += 1
        names = ("feature", "column", "kind", "why", "test")
        return {
            "kind": "tests",
            **self.source,
            "command": self.source["command"].replace("__main__.py", "pytest", 1),
            "minutes": round((time.monotonic() - self.start) / 60, 1),
            "passed": len(results["passed"]),
            "failed": results["failed"],
            "skipped": dict(sorted(reasons.items())),
            "seconds": {file: {kind: round(s, 1) for kind, s in both.items()} for file, both in seconds.items()},
            "cells": [
                dict(zip(names, cell, strict=True)) | {kind: counts[kind] for kind in ("passed", "failed", "skipped")}
                for cell, counts in sorted(cells.items())
            ],
        }


def seconds_of(file: str, kinds: set[str]) -> float:
    """Return the seconds of a file's tests in the kept run; 60 for a file that is not in it."""
    known = _kept().get(file)
    return 60.0 if known is None else sum(known[kind] for kind in kinds)


@cache
def _kept() -> dict[str, dict[str, float]]:
    return json.loads(KEPT.read_text(encoding="utf-8"))["seconds"] if KEPT.is_file() else {}
