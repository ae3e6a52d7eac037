"""What the tests prove: ``python -m tests.claims [WORD]`` prints each test, and when it last passed in a kept run.

Runs are kept by ``scripts/test.sh --all --outcome=benchmarks/results/tests-all.json``. WORD: print only the files and
tests with this word.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
KEPT = FOLDER.parent / "benchmarks" / "results" / "tests-all.json"


def functions() -> dict[str, list[str]]:
    """Return the names of the test functions by file, relative to tests/."""
    return {
        str(file.relative_to(FOLDER)): [
            node.name
            for node in _tree(file).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        ]
        for file in sorted(FOLDER.rglob("test_*.py"))
    }


def lines(word: str = "") -> Iterator[str]:
    """Yield the lines of the list."""
    word = word.replace("_", " ")
    kept = json.loads(KEPT.read_text(encoding="utf-8"))["tests"]
    for file, names in functions().items():
        claim = (ast.get_docstring(_tree(FOLDER / file)) or "").partition("\n\n")[0].replace("\n", " ")
        shown = [name for name in names if word in f"{file} {claim} {name}".replace("_", " ")]
        if shown:
            yield f"\n{file}: {claim}"
        for name in shown:
            found = kept.get(f"tests/{file}::{name}", {})
            ends = [f"{_end(found[kind])}{' (slow)' * (kind == 'slow')}" for kind in ("fast", "slow") if kind in found]
            yield f"  {name.removeprefix('test_').replace('_', ' ')}: {', '.join(ends) or 'in no kept run'}"


def _end(entry: dict[str, Any]) -> str:
    """Return how the cases of a test ended, and when."""
    when = f"{entry['day']} at {entry['commit'][:9]}"
    if entry["failed"]:
        return f"{entry['failed']} FAILED {when}"
    if not entry["passed"]:
        return f"skipped {when}: {entry['why']}"
    return f"{entry['passed']} passed {when}"


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


if __name__ == "__main__":
    print("\n".join(lines(" ".join(sys.argv[1:]))))
