"""How the tests are laid out."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parent


def imported(file: Path) -> set[str]:
    """Every module that a file names in an import, and every name it imports from one."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_test_imports_another() -> None:
    """What tests share is in tests/support or the conftest.py of their folder, which import no test either."""
    tests = {".".join(file.relative_to(TESTS.parent).with_suffix("").parts) for file in TESTS.rglob("test_*.py")}
    found = {str(file.relative_to(TESTS)): imported(file) & tests for file in TESTS.rglob("*.py")}
    assert not {file: names for file, names in found.items() if names}
