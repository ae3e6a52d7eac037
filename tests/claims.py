"""What the tests prove: ``python -m tests.claims [WORD]`` prints each test file, its first sentence and its tests.

WORD: print only the files and tests with this word.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent


def lines(word: str = "") -> Iterator[str]:
    """Yield the lines of the list."""
    word = word.replace("_", " ")
    for path in sorted(FOLDER.rglob("test_*.py")):
        tree, file = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(FOLDER)
        claim = (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " ")
        tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        names = {test.name: any("slow" in ast.unparse(one).lower() for one in test.decorator_list) for test in tests}
        shown = [name for name in names if word in f"{file} {claim} {name}".replace("_", " ")]
        if shown:
            yield f"\n{file}: {claim}"
        for name in shown:
            yield f"  {name.removeprefix('test_').replace('_', ' ')}{' (slow, or slow cases)' * names[name]}"


if __name__ == "__main__":
    print("\n".join(lines(" ".join(sys.argv[1:]))))
