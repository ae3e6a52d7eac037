"""Write a head folder: all new files are completed next to the old ones, then renamed, the config last."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from vllm_mtpc.checkpoint.load import ADAPTER_DIGEST, ADAPTER_FILES, adapter_digest, check_shapes, shapes_of
from vllm_mtpc.checkpoint.locate import CONFIG_FILE, PROVENANCE_FILE, U_EMBED_FILE, WEIGHTS_FILE, hub_name
from vllm_mtpc.checkpoint.metadata import card_data
from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import replacing
from vllm_mtpc.heads.adapters import Adapters
from vllm_mtpc.heads.head import Head, build_head


def save_head(
    folder: Path | str,
    config: HeadConfig,
    head: Head,
    provenance: dict[str, Any],
    card: str,
    dtype: torch.dtype = torch.float16,
    adapters: Adapters | None = None,
) -> None:
    """Write the folder of an MtPC head. Files of an earlier head are replaced once all new ones are complete.

    `card` is the text of `README.md`, `provenance` that of `provenance.json`, without package versions. `dtype` is that
    of the head's tensors on disk; `adapters` of the `config.lora_layers` draft layers are saved in float32.

    Raises:
        CheckpointError: `load_head` would reject the weights. Nothing is written.
    """
    folder = Path(folder)
    if (given := adapters.num_layers if adapters else 0) != config.lora_layers:
        found = f"the config has lora_layers={config.lora_layers}, but the adapters have {given}"
        raise CheckpointError(f"{folder}: not saved: {found}; pass the draft layers the head was trained with")
    tensors = to_save(folder, head.state_dict(), dtype)
    if adapters:
        adapters = adapters._replace(tensors=to_save(folder, adapters.tensors, torch.float32))
    write_folder(folder, WEIGHTS_FILE, tensors, adapters, config, provenance, card)


def save_converted(
    out: Path,
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    title: str,
    record: dict[str, Any],
    adapters: Adapters | None = None,
) -> None:
    """Write the MtPC head that a conversion gives, in the narrowest dtype that stores all of its tensors exactly.

    float64 becomes float32. `title` is that of the card; "from" of `record`, the provenance, names the checkpoint.
    Raises CheckpointError for tensors of other names or shapes than the config's.
    """
    with torch.device("meta"):
        head = build_head(config)
    check_shapes(out, shapes_of(tensors), shapes_of(head.state_dict()), f"{CONFIG_FILE} and the target")
    head.load_state_dict(tensors, assign=True)
    dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors.values()} or {torch.float16})
    dtype = dtype if dtype in (torch.float16, torch.bfloat16) else torch.float32
    target = config.speculators_config.verifier.name_or_path
    card = (
        f"---\n{card_data(['mtpc', 'speculative-decoding'], hub_name(target)).to_yaml()}\n---\n\n# {title}\n\n"
        f"Converted from `{record['from']}` by `vllm-mtpc convert`; target `{target}`. Drafts do not change the "
        "target's output distribution.\n"
    )
    save_head(out, config, head, {"converted": record}, card, dtype, adapters)


def to_save(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return contiguous copies on the CPU in `dtype`. Raises CheckpointError for a tensor that is not finite then."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    tensors = {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(
                f"{folder}: tensor {name!r} holds NaN or infinity as {tensor.dtype}; not saved: train it again, or "
                "save with dtype=torch.float32"
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
    """Write a head's files, `tensors` and `metadata` to the file `weights`, then remove others of an earlier head."""
    metadata["format"], adapter_files = "pt", {}
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
    for name in {WEIGHTS_FILE, U_EMBED_FILE, *ADAPTER_FILES} - files.keys():
        (folder / name).unlink(missing_ok=True)


def package_versions(packages: Sequence[str] = ("vllm_mtpc", "torch", "transformers", "vllm")) -> dict[str, str]:
    """Return the versions of Python and of the installed ones among `packages`."""
    versions = {"python": platform.python_version()}
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
