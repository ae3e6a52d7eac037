"""`pytest --outcome=FILE`: what runs found, kept as JSON: each test, and each cell of the feature page, as it last ran.

A run replaces what it ran again and leaves the rest, so that slow tests can run apart. It is the source of
`python -m tests.claims`, of benchmarks/FEATURES.md (tests/support/features.py), and of the order of files in which
workers take them (tests/conftest.py).
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import claims
from tests.support.features import KEPT
from vllm_mtpc.engine import provenance

CELL = "feature"  # name of the property of a test that carries a cell of the feature page
NAMES = ("feature", "column", "kind", "why", "test")  # of a cell


class Outcome:
    """The plugin that writes FILE; on the controller alone, where workers run the tests."""

    def __init__(self, file: Path) -> None:
        self.file, self.source, self.start = file, provenance.collect("tests"), time.monotonic()
        self.reports: dict[str, list[pytest.TestReport]] = defaultdict(list)  # of a test's setup, call and teardown

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports[report.nodeid].append(report)

    def pytest_sessionfinish(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(self.file.read_text(encoding="utf-8")) if self.file.is_file() else {}
        self.file.write_text(as_text(self.as_json(before)), encoding="utf-8")

    def as_json(self, before: dict[str, Any]) -> dict[str, Any]:
        """Return the content of a file with that of ``before``, tests that no longer exist left out."""
        run = {"day": self.source["time"][:10], "commit": self.source["commit"]}
        ran: dict[tuple[str, str], dict[str, Any]] = {}
        cells: dict[tuple[str, ...], dict[str, Any]] = {}
        for test, reports in sorted(self.reports.items()):
            ended = next((one for one in reports if not one.passed), reports[0])
            function, kind = test.partition("[")[0], "slow" if "slow" in ended.keywords else "fast"
            new = {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, **run}
            entry = ran.setdefault((function, kind), new)
            entry[ended.outcome] += 1
            entry["seconds"] = round(entry["seconds"] + sum(one.duration for one in reports), 1)
            if ended.skipped:
                reason = ended.longrepr[2] if isinstance(ended.longrepr, tuple) else str(ended.longrepr)
                entry["why"] = reason.removeprefix("Skipped: ")
            for _, cell in (own for own in ended.user_properties if own[0] == CELL):
                key = (*cell, function.removeprefix("tests/"))
                found = cells.setdefault(key, {"passed": 0, "failed": 0, "skipped": 0, **run})
                found[ended.outcome] += 1
        tests: dict[str, dict[str, Any]] = {name: dict(kinds) for name, kinds in before.get("tests", {}).items()}
        for (function, kind), entry in ran.items():
            tests.setdefault(function, {})[kind] = entry
        known = {f"tests/{file}::{name}" for file, names in claims.functions().items() for name in names}
        tests = {name: kinds for name, kinds in sorted(tests.items()) if name in known}
        merged = {tuple(cell.pop(name) for name in NAMES): cell for cell in map(dict, before.get("cells", []))} | cells
        named = [
            dict(zip(NAMES, key, strict=True)) | cell
            for key, cell in sorted(merged.items())
            if f"tests/{key[-1]}" in known
        ]
        runs = {one["commit"]: one["trees"] for one in [*before.get("runs", []), before] if "trees" in one}
        passes = [*named, *(entry for kinds in tests.values() for entry in kinds.values())]
        others = {one["commit"] for one in passes} - {self.source["commit"]}
        return {
            "kind": "tests",
            **self.source,
            "command": self.source["command"].replace("__main__.py", "pytest", 1),
            "minutes": round((time.monotonic() - self.start) / 60, 1),
            "runs": [{"commit": one, "trees": trees} for one, trees in sorted(runs.items()) if one in others],
            "tests": tests,
            "cells": named,
        }


def as_text(values: dict[str, Any]) -> str:
    """Return JSON with a line for each run, test and cell."""
    parts = []
    for key, value in values.items():
        text = json.dumps(value, ensure_ascii=False)
        if key == "tests":
            lines = [f"  {json.dumps(name)}: {json.dumps(kinds, ensure_ascii=False)}" for name, kinds in value.items()]
            text = "{\n" + ",\n".join(lines) + "\n }"
        elif key in ("runs", "cells"):
            text = "[\n" + ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def seconds_of(file: str, kinds: set[str]) -> float:
    """Return the seconds of a file's tests in the kept runs; 60 for a file that is not in them."""
    known = _seconds().get(file)
    return 60.0 if known is None else sum(known[kind] for kind in kinds)


@cache
def _seconds() -> dict[str, dict[str, float]]:
    files: dict[str, dict[str, float]] = defaultdict(lambda: {"fast": 0.0, "slow": 0.0})
    if KEPT.is_file():
        for test, kinds in json.loads(KEPT.read_text(encoding="utf-8"))["tests"].items():
            for kind, entry in kinds.items():
                files[test.partition("::")[0]][kind] += entry["seconds"]
    return files
