"""Write benchmarks/COMPATIBILITY.md: releases of vLLM, Python and model runners of the kept runs of the tests.

    scripts/test.sh --outcome=benchmarks/results/tests-NAME.json      on another Python or vLLM: one more run
    python -m tests.support.compatibility --write benchmarks/COMPATIBILITY.md

What is declared is read from setup.py and proposers/config/versions.py; what was run,
from benchmarks/results/tests-*.json.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from tests.support.features import COLUMNS, ROWS, write_page

ROOT = Path(__file__).parents[2]
RUNS = "benchmarks/results/tests-*.json"
HEADER = """# Compatibility

vLLM, Python and model runner. Written by `python -m tests.support.compatibility --write benchmarks/COMPATIBILITY.md`
from
the declared releases ([setup.py](../setup.py), [versions.py](../proposers/config/versions.py)) and from kept runs of
the
tests (`benchmarks/results/tests-*.json`); not to be edited.

A cell counts rows of [FEATURES.md](FEATURES.md) that the tests of a run have shown: they *hold*, are *refused* or
turned off,
or *failed*; the run has no test of the others. **Not run**: no run is stored.
"""
FOOTER = """
V1 and V2 are vLLM's model runners. V2 ran on a CPU, its kernels interpreted; no run on a GPU is kept. Of vLLM 0.33 no
build for a CPU exists: CI runs [a part of the tests](../docs/internals.md#releases-of-vllm) on its Python with the
compiled
files of 0.32 (no file is kept). The CPU build of vLLM needs Python 3.11 or later. Other
releases of vLLM are tried with a warning; moved names are reported when a head is used.
"""


def declared() -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Return the tested releases of vLLM, the versions of Python, and the requirements of the extras with vLLM."""
    versions = (ROOT / "proposers" / "config" / "versions.py").read_text(encoding="utf-8")
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    releases = re.search(r"^TESTED\b[^=]*= (.+?)(?:  #.*)?$", versions, re.MULTILINE)
    pythons = re.search(r'"Programming Language :: Python :: \{version\}" for version in (\([^)]*\))', setup)
    extras = {name: re.search(rf'^    "{name}": (\[.*\]),$', setup, re.MULTILINE) for name in ("cpu", "cuda")}
    wanted = {name: ast.literal_eval(found[1]) for name, found in extras.items()}
    return list(ast.literal_eval(releases[1])), [one for one in ast.literal_eval(pythons[1]) if "." in one], wanted


def page() -> str:
    """Return the text of benchmarks/COMPATIBILITY.md from the kept runs of the tests."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(ROOT.glob(RUNS))]
    releases, pythons, extras = declared()
    newest = {_versions(run): run for run in sorted(runs, key=lambda run: run["time"])}
    rows = [(release, python) for release in releases for python in pythons]
    table = ["| vLLM | Python | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for key in [*rows, *sorted(newest.keys() - set(rows))]:
        cells = [_counted(newest[key], column) if key in newest else "not run" for column in COLUMNS]
        table.append(f"| {' | '.join([*key, *cells])} |")
    lists = [f"* `.[{name}]`: {', '.join(f'`{one}`' for one in wanted)}" for name, wanted in extras.items()]
    kept = [_described(run) for run in runs]
    return "\n".join([HEADER, *table, FOOTER, "## Kept runs", "", *kept, "", "## Requirements", "", *lists, ""])


def _counted(run: dict[str, Any], column: str) -> str:
    """The number of features that hold in a column, are refused, or failed."""
    shown: dict[str, set[str]] = defaultdict(set)  # kinds of tests by feature
    for cell in run["cells"]:
        if cell["column"] == column and cell["feature"] in ROWS and (cell["failed"] or cell["passed"]):
            shown[cell["feature"]].add("failed" if cell["failed"] else cell["kind"])
    failed = sum("failed" in kinds for kinds in shown.values())
    held = sum("failed" not in kinds and not kinds.isdisjoint(("distribution", "exact")) for kinds in shown.values())
    counts = ((held, "hold"), (len(shown) - failed - held, "refused or off"))
    parts = [f"{count} {word}" for count, word in counts if count] + [f"**{failed} failed**"] * bool(failed)
    return ", ".join(parts) + f" of {len(ROWS)}" if parts else "not run"


def _described(run: dict[str, Any]) -> str:
    versions, hardware = run["versions"], run["hardware"]
    device = ", ".join(hardware.get("gpus") or []) or f"{hardware['cores']} CPU cores"
    which = "without the slow tests" if "not slow" in run["command"] else "all tests"
    names = ("vllm", "python", "torch", "transformers", "triton")
    shown = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    skipped = sum(map(len, run["skipped"].values()))
    return (
        f"* {run['time'][:10]}, commit `{run['commit'][:12]}`, {device}, {which}: {shown}; {run['passed']} passed, "
        f"{len(run['failed'])} failed, {skipped} skipped"
    )


def _versions(run: dict[str, Any]) -> tuple[str, str]:
    """Minor versions of vLLM and Python: ("0.32", "3.11")."""
    of = run["versions"]
    return tuple(".".join(of[name].split("+")[0].split(".")[:2]) for name in ("vllm", "python"))


if __name__ == "__main__":
    write_page(sys.argv[1:], page)
