"""The table of distributions on Model Runner V2: kept as JSON while the tests run, shown in benchmarks/RESULTS.md.

pytest tests/e2e/test_distribution.py --distributions=benchmarks/results/distribution-v2.json
python -m tests.support.distribution_table --write benchmarks/RESULTS.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.features import write_page
from vllm_mtpc.engine import provenance

DISTRIBUTION = "distribution"  # name of the property of a test that carries what it measured
PAGE = Path(__file__).parents[2] / "benchmarks" / "RESULTS.md"
KEPT = PAGE.parent / "results" / "distribution-v2.json"
BEGIN, END = "<!-- distributions: written by tests/support/distribution_table.py -->\n", "<!-- /distributions -->\n"


class Distributions:
    """The plugin that puts what tests measure into FILE, in the place of what was measured of these cases before."""

    def __init__(self, file: Path) -> None:
        self.file, self.source = file, provenance.collect()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if report.when == "call" and name == DISTRIBUTION:
                kept = json.loads(self.file.read_text(encoding="utf-8")) if self.file.is_file() else {"cases": {}}
                measured = json.loads(value)
                kept["cases"][measured["case"]] = {**measured, **self.source}
                self.file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def table() -> str:
    """One line for each case of V2: of its kinds of request, the one whose distance is largest by its floor (of a
    fault: smallest)."""
    from tests.support.distribution_cases import CASES

    lines = ["| setting | drafts accepted | kinds x draws | TV | floor | of | verdict |", "|---" * 7 + "|"]
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    for name in (name for name, case in CASES.items() if case.runner != "v1"):
        case = kept["cases"].get(name)
        if case is None:
            lines.append(f"| {name} | | | | | | not run yet |")
            continue
        by_share = sorted(case["rows"], key=lambda row: row["distance"] / row["floor"] if row["floor"] else 0)
        row = by_share[0 if name.startswith("fault") else -1]
        verdicts = ", ".join(sorted({row["verdict"] for row in case["rows"]}))
        accepted = "" if case["acceptance"] is None else f"{case['acceptance']:.0%}"
        asked, found = f"{len(case['rows'])} x {row['draws']:,}", f"{row['distance']:.4f} | {row['floor']:.4f}"
        lines.append(f"| {name} | {accepted} | {asked} | {found} | {row['setting']} | {verdicts} |")
    return "\n".join([*lines, ""])


def page() -> str:
    """Return the text of benchmarks/RESULTS.md with a new table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    write_page(sys.argv[1:], page)
