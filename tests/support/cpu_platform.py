"""vLLM's CPU platform, for tests of its Ray executor, which takes accelerators only: one "GPU" a worker.

`install` makes a distribution of this file that vLLM finds by its entry point, in every process with it on its path.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from vllm.platforms.cpu import CpuPlatform

NAME = "mtpc_test_platform"


class RayCpuPlatform(CpuPlatform):
    """What vLLM asks of a platform before it lets Ray place workers."""

    ray_device_key = "GPU"


def register() -> str:
    return f"{NAME}.RayCpuPlatform"


def install(folder: Path) -> Path:
    """A folder for PYTHONPATH."""
    shutil.copy(__file__, folder / f"{NAME}.py")
    info = folder / f"{NAME}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.platform_plugins]\n{NAME} = {NAME}:register\n")
    return folder
