"""mypy over the package as it is installed, which its users' type checkers read (py.typed)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def installed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as setup.py installs it: proposers/ and kernels/ are subpackages of vllm_mtpc."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed: type pip install '.[test]'")
    folder = tmp_path_factory.mktemp("installed")
    (folder / "vllm_mtpc").mkdir()
    for part in (*(root / "vllm_mtpc").iterdir(), root / "proposers", root / "kernels"):
        (folder / "vllm_mtpc" / part.name).symlink_to(part)
    (folder / "pyproject.toml").symlink_to(root / "pyproject.toml")
    return folder


def check(installed: Path, *words: str | Path) -> str:
    """What mypy finds, an empty string where that is nothing."""
    command = [sys.executable, "-m", "mypy", "--cache-dir", installed / "cache", "--no-error-summary", *words]
    done = subprocess.run(list(map(str, command)), cwd=installed, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_types_hold(installed: Path) -> None:
    assert check(installed) == ""


def test_wrong_types_are_found_in_a_users_module(installed: Path, tmp_path: Path) -> None:
    """Types of every part are known to a user's checker: none is Any."""
    user = tmp_path / "user.py"
    lines = [
        "from vllm_mtpc import demo; one: int = demo.path('btree')",
        "from vllm_mtpc.kernels import suffixes; two: str = suffixes.ABSENT",
        "from vllm_mtpc.models import registration; three: int = registration.ARCHITECTURES",
        "from vllm_mtpc.proposers.patches import patch; four: int = patch.applied",
    ]
    user.write_text("\n".join(lines))
    found = check(installed, user)
    for number, type_ in enumerate(('"Path"', '"int"', '"dict[str, str]"', '"dict[str, Patch]"'), start=1):
        assert f"user.py:{number}: error: Incompatible types in assignment (expression has type {type_}" in found
