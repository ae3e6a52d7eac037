"""Heads that may not be read, and a hub that is not to be reached: one line and exit code 1."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_mtpc.cli import main

CASES = ("config", "weights", "folder", "parent", "bundled")
# Everything is imported by the first look: the user of the second may not read this package. Root may read everything.
CODE = """
import os, sys
from vllm_mtpc.cli import main
good, *places = sys.argv[1:]
assert main(["inspect", good]) == 0
if os.geteuid() == 0:
    os.setuid(65534)
for place in places:
    print(place, main(["inspect", place]), file=sys.stderr)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for path in folder.rglob("*"):
        path.chmod(0o755)
    shutil.rmtree(folder)


def test_what_may_not_be_read_is_refused_in_one_line(folder: Path, open_folder: Path) -> None:
    places = {name: Path(shutil.copytree(folder, open_folder / name / "head")) for name in ("good", *CASES)}
    places["bundled"] = places["bundled"].rename(open_folder / "bundled" / "mtpc").parent
    shut = {
        "config": places["config"] / "config.json",
        "weights": places["weights"] / "model.safetensors",
        "folder": places["folder"],
        "parent": places["parent"].parent,
        "bundled": places["bundled"] / "mtpc",
    }
    for path in shut.values():
        path.chmod(0)
    command = [sys.executable, "-c", CODE, *map(str, places.values())]
    said = subprocess.run(command, capture_output=True, text=True, cwd="/", env={**os.environ, "HOME": "/"})
    assert said.returncode == 0, said.stderr
    lines = said.stderr.splitlines()
    assert len(lines) == 2 * len(CASES), said.stderr
    for place, message, result in zip(list(places.values())[1:], lines[::2], lines[1::2], strict=True):
        assert message.startswith("vllm-mtpc: error: ") and str(place) in message
        assert result == f"{place} 1"
    assert "chmod -R a+rX" in lines[2 * CASES.index("folder")]


def test_a_hub_that_is_offline_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert main(["inspect", "vllm-mtpc-tests/no-such-head"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("vllm-mtpc: error: no head at 'vllm-mtpc-tests/no-such-head': not a local folder, and not")
    assert said.count("\n") == 1
