"""Writing a head: all files complete next to the old ones first, then renamed together, the config last."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from vllm_mtpc.checkpoint.load import ADAPTER_DIGEST, ADAPTER_FILES, adapter_digest
from vllm_mtpc.checkpoint.locate import CONFIG_FILE, PROVENANCE_FILE, SERVED_FILE, U_EMBED_FILE, WEIGHTS_FILE
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import replacing
from vllm_mtpc.heads.adapters import Adapters, DraftLayers
from vllm_mtpc.heads.base import Head


def save_head(
    folder: Path | str,
    config: HeadConfig,
    head: Head,
    provenance: dict[str, Any],
    card: str,
    dtype: torch.dtype = torch.float16,
    draft_layers: DraftLayers | Adapters | None = None,
) -> None:
    """Write a head folder. `provenance` says how the head came about; package versions are added.

    `draft_layers` are those the head was trained with (config.lora_layers of them); their adapters travel with it, in
    float32. A folder that already holds a head keeps its old files until all new ones are complete. Raises
    CheckpointError, before anything is written, for weights that load_head would refuse.
    """
    folder = Path(folder)
    adapters = draft_layers.adapters if isinstance(draft_layers, DraftLayers) else draft_layers
    given = adapters.num_layers if adapters else 0
    if given != config.lora_layers:
        raise CheckpointError(
            f"{folder}: the head's config says lora_layers={config.lora_layers}, but {given} draft layers are to be "
            "saved; not saved: hand save_head the draft layers the head was trained with"
        )
    tensors = to_save(folder, head.state_dict(), dtype)
    if adapters:
        adapters = adapters._replace(tensors=to_save(folder, adapters.tensors, torch.float32))
    write_folder(folder, WEIGHTS_FILE, tensors, adapters, config, provenance, card)


def to_save(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """`tensors` as they are written; raises CheckpointError for one that load_head would refuse."""
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in tensors.items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{folder}: tensor {name!r} holds NaN or infinity as {tensor.dtype}; not saved: "
                "train it again, or save with dtype=torch.float32 if it left the range of a 16-bit float"
            )
    return tensors


def write_folder(
    folder: Path,
    weights: str,
    tensors: Mapping[str, Tensor],
    adapters: Adapters | None,
    config: AnyHeadConfig,
    provenance: dict[str, Any],
    card: str,
    **metadata: str,
) -> None:
    """Write a head's files, the tensors in the file `weights` first; then remove what the head before it had more.

    The file of the tensors has `metadata` and the digest of the adapters.
    """
    metadata |= {"format": "pt"}
    adapter_files: dict[str, bytes] = {}
    if adapters:
        adapter_files = adapters.files(config.speculators_config.verifier.name_or_path)
        metadata[ADAPTER_DIGEST] = adapter_digest(adapter_files)
    record = {"versions": package_versions(), **provenance}
    files = {  # the config comes last: without it there is no head
        weights: save(dict(tensors), metadata=metadata),
        **adapter_files,
        "README.md": card.encode(),
        PROVENANCE_FILE: (json.dumps(record, indent=2) + "\n").encode(),
        CONFIG_FILE: config.to_json().encode(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(*(folder / name for name in files)) as unfinished:
        for file, data in zip(unfinished, files.values(), strict=True):
            file.write_bytes(data)
    for name in {WEIGHTS_FILE, U_EMBED_FILE, SERVED_FILE, *ADAPTER_FILES} - files.keys():
        (folder / name).unlink(missing_ok=True)


def package_versions(packages: Sequence[str] = ("vllm_mtpc", "torch", "transformers", "vllm")) -> dict[str, str]:
    """Versions of Python and of what made a checkpoint or a result; what is not installed is left out."""
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
