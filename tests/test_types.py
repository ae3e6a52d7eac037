"""mypy over the package, whose types are read by its users' type checkers (py.typed)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


def check(root: Path, cache: Path, *words: str | Path) -> str:
    """Return the findings of mypy, an empty string where it has none."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed: type pip install '.[test]'")
    command = [sys.executable, "-m", "mypy", "--cache-dir", cache, "--no-error-summary", *words]
    done = subprocess.run(list(map(str, command)), cwd=root, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_types_hold(root: Path, cache: Path) -> None:
    assert check(root, cache) == ""


def test_wrong_types_are_found_in_a_users_module(root: Path, cache: Path, tmp_path: Path) -> None:
    """Types of every part are known to a user's checker: none is Any."""
    user = tmp_path / "user.py"
    lines = [
        "from vllm_mtpc import demo; one: int = demo.path('btree')",
        "from vllm_mtpc.kernels import suffixes; two: str = suffixes.ABSENT",
        "from vllm_mtpc.models import registration; three: int = registration.ARCHITECTURES",
        "from vllm_mtpc.proposers.patches import patch; four: int = patch.applied",
    ]
    user.write_text("\n".join(lines))
    found = check(root, cache, user)
    for number, type_ in enumerate(('"Path"', '"int"', '"dict[str, str]"', '"dict[str, Patch]"'), start=1):
        assert f"user.py:{number}: error: Incompatible types in assignment (expression has type {type_}" in found
