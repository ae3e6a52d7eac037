"""`pytest --outcome=FILE`: what a run found, kept as JSON.

It is the source of benchmarks/FEATURES.md (tests/support/features.py), and of the order of files in which workers take
them (tests/conftest.py).
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
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
        self.results: dict[str, str] = {}  # by test
        self.reasons: dict[str, list[str]] = defaultdict(list)  # of skips
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: {"fast": 0.0, "slow": 0.0})
        self.cells: dict[str, list[list[str]]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self.seconds[test.partition("::")[0]]["slow" if "slow" in report.keywords else "fast"] += report.duration
        if report.failed:
            self.results[test] = "failed"
        elif report.skipped:
            self.results[test] = "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.reasons[reason.removeprefix("Skipped: ")].append(test)
        elif report.when == "call":
            self.results.setdefault(test, "passed")
        self.cells[test] = [value for name, value in report.user_properties if name == CELL]

    def pytest_sessionfinish(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(self.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    def as_json(self) -> dict[str, Any]:
        of = {kind: [test for test, result in self.results.items() if result == kind] for kind in ("passed", "failed")}
        seconds = {file: {kind: round(s, 1) for kind, s in both.items()} for file, both in sorted(self.seconds.items())}
        return {
            "kind": "tests",
            **self.source,
            "command": self.source["command"].replace("__main__.py", "pytest", 1),
            "minutes": round((time.monotonic() - self.start) / 60, 1),
            "passed": len(of["passed"]),
            "failed": sorted(of["failed"]),
            "skipped": {reason: sorted(tests) for reason, tests in sorted(self.reasons.items())},
            "seconds": seconds,
            "cells": self.cells_as_json(),
        }

    def cells_as_json(self) -> list[dict[str, Any]]:
        """Return the cells of the feature page that each test function fills, with its counts of results."""
        counted: dict[tuple[str, ...], dict[str, int]] = {}
        for test in sorted(self.cells):
            function = test.partition("[")[0].removeprefix("tests/")
            for cell in self.cells[test]:
                ended = counted.setdefault((*cell, function), {"passed": 0, "failed": 0, "skipped": 0})
                ended[self.results.get(test, "failed")] += 1
        names = ("feature", "column", "kind", "why", "test")
        return [dict(zip(names, cell, strict=True)) | ended for cell, ended in sorted(counted.items())]


def seconds_of(file: str, kinds: set[str]) -> float:
    """Return the seconds of a file's tests in the kept run; 60 for a file that is not in it."""
    known = _kept().get(file)
    return 60.0 if known is None else sum(known[kind] for kind in kinds)


@cache
def _kept() -> dict[str, dict[str, float]]:
    return json.loads(KEPT.read_text(encoding="utf-8"))["seconds"] if KEPT.is_file() else {}
