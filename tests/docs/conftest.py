"""The site, built once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built where torch and vLLM cannot be imported."""
    out, absent = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("absent")
    for name in ("torch", "vllm"):
        (absent / f"{name}.py").write_text(f"raise ImportError('the site needs no {name}')\n")
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(absent)}
    command = [root / "scripts" / "site.sh", out]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out
