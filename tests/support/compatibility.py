"""The page of what was run with what, docs/compatibility.md: vLLM, Python, model runner, as kept runs of the tests say.

    scripts/test.sh --outcome=benchmarks/results/tests-NAME.json      on another Python or vLLM: one more run
    python -m tests.support.compatibility --write docs/compatibility.md

What is declared is read from setup.py and proposers/config/versions.py; what was run,
from benchmarks/results/tests-*.json.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.features import COLUMNS, ROWS

ROOT = Path(__file__).parents[2]
RUNS = "benchmarks/results/tests-*.json"
HEADER = """# Compatibility

vLLM, Python and model runner. Written by `python -m tests.support.compatibility --write docs/compatibility.md` from
what is declared ([setup.py](../setup.py), [versions.py](../proposers/config/versions.py)) and from kept runs of the
tests (`benchmarks/results/tests-*.json`); not to be edited.

A cell counts the rows of the [features](features.md) page that the tests of a run have shown: they *hold*, or are
*refused* or turned off as the page says, or *failed*; of the others that run has no test. **Not run**: nobody has kept
a run there.
"""
FOOTER = """
V1 and V2 are vLLM's model runners. V2 ran on a CPU, its kernels interpreted; no run on a GPU is kept. Of vLLM 0.33 no
build for a CPU exists: its Python ran by hand on the compiled files of 0.32, for [a part of the
tests](internals.md#releases-of-vllm), of which no file is kept. The CPU build of vLLM needs Python 3.11 or later. Other
releases of vLLM are tried with a warning; what they have moved is named when a head is asked for.
"""


def declared(root: Path = ROOT) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Releases of vLLM, versions of Python, and what the extras that bring vLLM ask for."""
    versions = ast.parse((root / "proposers" / "config" / "versions.py").read_text(encoding="utf-8"))
    text = (root / "setup.py").read_text(encoding="utf-8")
    releases = next(
        ast.literal_eval(node.value)
        for node in versions.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["TESTED"]
    )
    pythons = re.search(r'"Programming Language :: Python :: \{version\}" for version in (\([^)]*\))', text)
    if pythons is None:
        raise ValueError("setup.py names no versions of Python where this looks for them; mend declared()")
    extras = {name: re.search(rf'^    "{name}": (\[.*\]),$', text, re.MULTILINE) for name in ("cpu", "cuda")}
    wanted = {name: ast.literal_eval(found[1]) for name, found in extras.items() if found}
    return list(releases), [one for one in ast.literal_eval(pythons[1]) if "." in one], wanted


def page(runs: Sequence[dict[str, Any]], root: Path = ROOT) -> str:
    """The text of docs/compatibility.md from the JSON of runs (tests/support/outcome.py)."""
    releases, pythons, extras = declared(root)
    ran: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run["time"]):
        ran[minor(run["versions"]["vllm"]), minor(run["versions"]["python"])].append(run)
    beyond = sorted(set(ran) - {(release, python) for release in releases for python in pythons})
    rows = [(release, python) for release in releases for python in pythons] + beyond
    table = ["| vLLM | Python | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for key in rows:
        newest = ran[key][-1] if ran[key] else None
        cells = ["not run" if newest is None else counted(newest, column) for column in COLUMNS]
        table.append(f"| {' | '.join([*key, *cells])} |")
    lists = [f"* `.[{name}]`: {', '.join(f'`{one}`' for one in wanted)}" for name, wanted in extras.items()]
    kept = [described(run) for found in ran.values() for run in found]
    return "\n".join([HEADER, *table, FOOTER, "## Kept runs", "", *kept, "", "## What is asked for", "", *lists, ""])


def counted(run: dict[str, Any], column: str) -> str:
    """How many features hold in a column, are refused, failed; those that nothing has tested are left out."""
    said: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell in run["cells"]:
        if cell["column"] == column and cell["feature"] in ROWS and (cell["failed"] or cell["passed"]):
            said[cell["feature"]].append(cell)
    failed = sum(any(cell["failed"] for cell in cells) for cells in said.values())
    held = sum(
        any(cell["kind"] in ("distribution", "exact") for cell in cells) and not any(cell["failed"] for cell in cells)
        for cells in said.values()
    )
    refused = len(said) - failed - held
    parts = [f"{count} {word}" for count, word in ((held, "hold"), (refused, "refused or off")) if count]
    parts += [f"**{failed} failed**"] * bool(failed)
    return ", ".join(parts) + f" of {len(ROWS)}" if parts else "not run"


def described(run: dict[str, Any]) -> str:
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


def minor(version: str) -> str:
    """ "0.32.0+cpu" -> "0.32"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def kept_runs(root: Path = ROOT) -> list[dict[str, Any]]:
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(root.glob(RUNS))]


def main(arguments: list[str]) -> None:
    if len(arguments) != 2 or arguments[0] != "--write":
        given = " ".join(arguments) or "nothing"
        sys.exit(f"given {given}; type: python -m tests.support.compatibility --write docs/compatibility.md")
    Path(arguments[1]).write_text(page(kept_runs()), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
