"""Writing a head: weights first, config last, each file replaced in one step."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from vllm_mtpc.checkpoint.locate import CONFIG_FILE, PROVENANCE_FILE, WEIGHTS_FILE
from vllm_mtpc.errors import CheckpointError

if TYPE_CHECKING:
    from vllm_mtpc.config import HeadConfig
    from vllm_mtpc.heads.linear import LinearHead


def save_head(
    folder: Path | str,
    config: HeadConfig,
    head: LinearHead,
    provenance: dict[str, Any],
    card: str,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Write a head folder. `provenance` says how the head came about; package versions are added.

    A folder that already holds a head keeps its old files until each new one is complete. Raises
    CheckpointError, before anything is written, for weights that load_head would refuse.
    """
    folder = Path(folder)
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in head.state_dict().items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{folder}: tensor {name!r} holds NaN or infinity as {dtype}; not saved: "
                "train it again, or save with dtype=torch.float32 if it left the range of a 16-bit float"
            )
    record = {"versions": package_versions(), **provenance}
    files = {  # the config comes last: without it there is no head
        WEIGHTS_FILE: save(tensors, metadata={"format": "pt"}),
        "README.md": card.encode(),
        PROVENANCE_FILE: (json.dumps(record, indent=2) + "\n").encode(),
        CONFIG_FILE: config.to_json().encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        replace_file(folder / name, data)


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` beside `path`, then move it there: a reader sees the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def package_versions() -> dict[str, str]:
    """Versions of what made a checkpoint; packages that are not installed are left out."""
    versions = {"python": platform.python_version()}
    for name in ("vllm_mtpc", "torch", "transformers", "vllm"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
