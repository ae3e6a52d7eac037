"""The types of the package hold: mypy over what pyproject.toml lists, as its users' checkers read it (py.typed)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both tests know of the libraries."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed: type pip install '.[test]'")
    return tmp_path_factory.mktemp("mypy")


def check(cwd: Path, cache: Path, *words: str | Path) -> str:
    """What mypy finds, an empty string where that is nothing."""
    command = [sys.executable, "-m", "mypy", "--cache-dir", cache, "--no-error-summary", *words]
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_types_hold(root: Path, cache: Path) -> None:
    assert check(root, cache) == ""


def test_a_wrong_type_would_be_found(root: Path, tmp_path: Path, cache: Path) -> None:
    """Of a user's module, too: what the package promises is not Any."""
    user = tmp_path / "user.py"
    user.write_text("from vllm_mtpc import demo\nfolder: int = demo.path('btree')\n")
    found = check(root, cache, "--config-file", root / "pyproject.toml", user)
    assert 'expression has type "Path", variable has type "int"' in found
