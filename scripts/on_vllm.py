#!/usr/bin/env python3
"""Runs a command on another release of vLLM: its Python with the compiled files of the vLLM that is installed.

    scripts/on_vllm.py 0.33.0 .venv/bin/python -m pytest tests/proposers tests/e2e -m "not slow"

For releases that have no build for this machine, a CPU above all. pip downloads the release's wheel once (a few hundred
MB); its required files stay in .venv/vllm-VERSION. Good for all that Python decides: the vLLM patches, scheduling,
samplers,
Triton's kernels. A compiled operator whose signature the release has changed fails where it is called, which says
nothing about this package. Install additional requirements of the release yourself (0.33: orjson).
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import os
import shutil
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMPILED = (".so", "vllm-rs")


def unpack(wheel: Path, installed: Path, label: str, place: Path) -> None:
    """Makes the folder `place`: a wheel's Python with the compiled files of the package folder `installed`.

    label: of the installed build, "+cpu" or empty; vLLM reads its platform from there.
    """
    half = place.with_suffix(".half")
    shutil.rmtree(half, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(COMPILED):
                archive.extract(name, half)
    for file in installed.glob("*.so"):
        shutil.copy(file, half / "vllm")
    metadata = next(half.glob("vllm-*.dist-info")) / "METADATA"
    lines = metadata.read_text(encoding="utf-8").split("\n")
    lines = [line + label if line.startswith("Version: ") else line for line in lines]
    metadata.write_text("\n".join(lines), encoding="utf-8")
    compileall.compile_dir(half, quiet=2, workers=0)
    half.rename(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", help="e.g. 0.33.0")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    args = parser.parse_args()
    if not args.command:
        parser.error("name a command, e.g. .venv/bin/python -m pytest tests/proposers")
    place = ROOT / ".venv" / f"vllm-{args.release}"
    if not place.is_dir():
        from check_vllm import download

        installed = Path(importlib.util.find_spec("vllm").origin).parent
        label = "".join(version("vllm").partition("+")[1:])
        with tempfile.TemporaryDirectory() as folder:
            unpack(download(args.release, folder), installed, label, place)
    path = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
    os.execvpe(args.command[0], args.command, {**os.environ, "PYTHONPATH": path})


if __name__ == "__main__":
    main()
