"""List the claims of the tests: tests/claims.md, one line per test function, grouped by module.

python -m tests.support.claims --write tests/claims.md
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from tests.support.features import write_page

ROOT = Path(__file__).parents[2]
HEADER = """# Claims

The claims of the tests. Written by `python -m tests.support.claims --write tests/claims.md` from the docstrings of the
test modules and the names and marks of the test functions; not to be edited. `nightly` tests run with `--all`.
"""


def page(folder: Path = ROOT / "tests") -> str:
    """Return the text of tests/claims.md for a folder of tests."""
    parts = [HEADER]
    for file in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        claims = list(_claims(tree.body))
        sentence = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
        if claims:
            parts += [f"## {file.relative_to(folder)}", "", sentence, "", *claims, ""]
    return "\n".join(parts)


def _claims(body: list[ast.stmt]) -> list[str]:
    lines = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            name = node.name.removeprefix("test_").replace("_", " ")
            is_slow = any(ast.unparse(mark) == "pytest.mark.slow" for mark in node.decorator_list)
            lines.append(f"* {name}" + "; nightly" * is_slow)
    return lines


if __name__ == "__main__":
    write_page(sys.argv[1:], page)
