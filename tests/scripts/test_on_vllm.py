"""A release's Python with the compiled files of another build, as scripts/on_vllm.py puts them together."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_release_is_put_together(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("on_vllm", ROOT / "scripts" / "on_vllm.py")
    on_vllm = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(on_vllm)
    wheel, installed, place = tmp_path / "vllm.whl", tmp_path / "installed", tmp_path / "vllm-0.99.0"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "NAME = 'the release'")
        archive.writestr("vllm/_C.abi3.so", "of a GPU")
        archive.writestr("vllm-0.99.0.dist-info/METADATA", "Name: vllm\nVersion: 0.99.0\nSummary: fast\n")
    installed.mkdir()
    (installed / "_C.abi3.so").write_text("of this CPU")
    on_vllm.unpack(wheel, installed, "+cpu", place)
    assert (place / "vllm" / "_C.abi3.so").read_text() == "of this CPU"
    code = "import importlib.metadata as m, vllm; print(vllm.NAME, m.version('vllm'))"
    said = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(place)}, capture_output=True, text=True)
    assert said.stdout == "the release 0.99.0+cpu\n", said.stderr
    assert list(place.rglob("*.pyc")), "not compiled again by every process"
