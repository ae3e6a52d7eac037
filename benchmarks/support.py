"""What is proved, and where: ``python -m benchmarks.support build/tests.xml [--write]``.

`support.yaml` names the tests, or the result files, behind each cell of docs/operations.md#what-is-tested-where. The
file of a run of tests (`scripts/test.sh` leaves build/tests.xml) says which of them passed. CI fails where a cell has
lost its proof: there is no such test any more, or it did not pass. A slow test, which that run leaves out, counts from
the run whose day `support.json` has.

--write: note the cells that these tests prove, and write the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from vllm_mtpc.cli import guard
from vllm_mtpc.engine.provenance import RESULTS, ROOT
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.files import read_json, read_yaml
from vllm_mtpc.report import markdown

PROG = "python -m benchmarks.support"
PAGE, CELLS = ROOT / "docs" / "operations.md", Path(__file__).with_name("support.yaml")
RECORD = Path(__file__).with_name("support.json")
COLUMNS = ("V1, CPU", "V2, interpreted", "V2, rehearsed", "compiled", "GPU")
ALWAYS = "always"
MARKS = "<!-- support: written by python -m benchmarks.support -->", "<!-- end of support -->"


class Outcome(NamedTuple):
    """A test of a run."""

    name: str  # tests/FOLDER/FILE.py::TEST[CASE]
    passed: bool
    slow: bool


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, metavar="FILE", help="of pytest --junitxml")
    parser.add_argument("--write", action="store_true", help="note what these tests prove, and write the table")
    args = parser.parse_args(arguments)
    return guard(PROG, lambda: update(args.run, args.write))


def update(run: Path, write: bool) -> int:
    """Compare the table with a run, or write it."""
    cells, record = read_yaml(CELLS), read_json(RECORD) if RECORD.exists() else {}
    day, outcomes = read_run(run)
    found, lost = proved(cells, outcomes, day, record, whole=not write)
    page = PAGE.read_text(encoding="utf-8")
    new = with_table(page, table(cells, found))
    if write:
        RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(new, encoding="utf-8")
    if lost:
        raise MtpcError(f"no proof: {'; '.join(lost)}; see {CELLS.name}")
    if not write and (new, found) != (page, record):
        raise MtpcError(f"docs/operations.md: the table is not that of this run; type {PROG} {run} --write")
    return 0


def read_run(file: Path) -> tuple[str, list[Outcome]]:
    """Return the day of a run, and its tests."""
    suite = next(ElementTree.parse(file).getroot().iter("testsuite"))
    outcomes = []
    for case in suite.iter("testcase"):
        name = f"{case.attrib['classname'].replace('.', '/')}.py::{case.attrib['name']}"
        slow = any(one.attrib["name"] == "slow" for one in case.iter("property"))
        bad = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
        outcomes.append(Outcome(name, not bad, slow))
    return suite.attrib["timestamp"][:10], outcomes


def proved(
    cells: dict[str, dict[str, list[str]]], outcomes: list[Outcome], day: str, record: dict[str, str], whole: bool
) -> tuple[dict[str, str], list[str]]:
    """Return when each cell was proved last ("always": in every run), and those without a proof.

    Args:
        cells: feature -> column -> tests (* stands for anything), or a result file.
        outcomes: Of a run.
        day: Of the run.
        record: What earlier runs proved, as it is returned.
        whole: The run has every test that is not slow.
    """
    found, lost = dict[str, str](), list[str]()
    for feature, columns in cells.items():
        for column, proofs in columns.items():
            key = f"{feature}: {column}"
            old = "" if whole and record.get(key) == ALWAYS else record.get(key, "")
            states = [proof(one, outcomes, day, old) for one in proofs]
            if all(states):
                found[key] = min(states)  # days come before "always"
            else:
                lost.append(f"{key}, {proofs[states.index('')]}")
    return found, lost


def proof(name: str, outcomes: Iterable[Outcome], day: str, old: str) -> str:
    """Return when a test (all its cases) or a result file proved something last; empty: it does not."""
    if name.endswith(".json"):
        file = RESULTS / name
        return read_json(file)["time"][:10] if file.exists() else ""
    pattern = name.replace("[", "[[]")
    ran = [one for one in outcomes if fnmatchcase(one.name, pattern) or one.name.startswith(f"{name}[")]
    if ran:
        always = ALWAYS if not all(one.slow for one in ran) else day
        return always if all(one.passed for one in ran) else ""
    file, _, test = name.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).exists() else ""
    return old if f"\ndef {test.partition('[')[0]}(" in text else ""


def table(cells: dict[str, dict[str, list[str]]], found: dict[str, str]) -> str:
    """Return the table of docs/operations.md."""
    shown = {"": "", ALWAYS: "✓"}
    rows = [
        [feature, *(shown.get(when := found.get(f"{feature}: {column}", ""), when) for column in COLUMNS)]
        for feature in cells
    ]
    return markdown(["", *COLUMNS], rows)


def with_table(page: str, new: str) -> str:
    """Return a page with the table between its marks."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{new}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


if __name__ == "__main__":
    sys.exit(main())
