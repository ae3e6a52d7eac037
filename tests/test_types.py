"""mypy over the package, whose types are read by its users' type checkers (py.typed)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

USER = {  # lines of a user's module with a wrong type each, and the type that they assign
    "from vllm_mtpc import demo; one: int = demo.path('btree')": '"Path"',
    "from vllm_mtpc.kernels import filter; two: str = filter.MAX_COMPONENTS": '"int"',
    "from vllm_mtpc.models import registration; three: int = registration.ARCHITECTURES": '"dict[str, str]"',
    "from vllm_mtpc.proposers.patches import patch; four: int = patch.applied": '"dict[str, Patch]"',
}


@pytest.fixture(scope="module")
def found(root: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The findings of mypy in the package and in a user's module."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed: type pip install '.[test]'")
    folder = tmp_path_factory.mktemp("types")
    (folder / "user.py").write_text("\n".join(USER))
    words = ["--cache-dir", str(folder / "cache"), "--no-error-summary", "vllm_mtpc", str(folder / "user.py")]
    done = subprocess.run([sys.executable, "-m", "mypy", *words], cwd=root, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_types_hold(found: list[str]) -> None:
    assert not [line for line in found if "user.py:" not in line]


def test_wrong_types_are_found_in_a_users_module(found: list[str]) -> None:
    """Types of every part are known to a user's checker: none is Any."""
    for number, type_ in enumerate(USER.values(), start=1):
        wanted = f"user.py:{number}: error: Incompatible types in assignment (expression has type {type_}"
        assert any(wanted in line for line in found), wanted
