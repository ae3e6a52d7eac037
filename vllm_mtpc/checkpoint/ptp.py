"""The folder of a PTP head: PEFT's adapter files, `u_embed.safetensors`, and what every head has.

`u_embed.safetensors` has the embedding of u and, in names that start with "late.", the late network where there is one.
It names, in its metadata, the adapters it was trained with (their digest) and what no shape tells:
the variant and the embedding. A folder whose files are of two heads is refused, not served badly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from vllm_mtpc.checkpoint.adapters import (
    ADAPTER_DIGEST,
    AdapterInfo,
    adapter_digest,
    adapter_tensors,
    check_adapter_shapes,
    check_digest,
    check_files,
    module_names,
    read_adapter_config,
)
from vllm_mtpc.checkpoint.load import of_method, read_config
from vllm_mtpc.checkpoint.locate import U_EMBED_FILE, require_weights
from vllm_mtpc.checkpoint.save import closing_files, to_save, write_folder
from vllm_mtpc.checkpoint.tensors import check_names, checked, stored_shapes
from vllm_mtpc.config.ptp import PtpConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import open_tensors
from vllm_mtpc.heads.adapters import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, MODULES, Adapters
from vllm_mtpc.heads.ptp.embedding import AuxEmbedding, build_embedding
from vllm_mtpc.heads.ptp.late import LateNetwork, build_late
from vllm_mtpc.heads.ptp.student import Student

LATE = "late."  # in front of the names of the late network's tensors


class PtpHead(NamedTuple):
    """A PTP head as it is on disk; `load_student` puts it on its target."""

    config: PtpConfig
    lora: dict[str, Tensor]  # PEFT's names
    embedding: AuxEmbedding  # eval mode, no gradients
    late: LateNetwork | None = None  # the same


def save_ptp(
    folder: Path | str,
    config: PtpConfig,
    lora: Mapping[str, Tensor],
    embedding: AuxEmbedding,
    provenance: dict[str, Any],
    card: str,
    dtype: torch.dtype = torch.float16,
    late: LateNetwork | None = None,
) -> None:
    """Write a head folder; `lora` has PEFT's names ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight").

    Raises CheckpointError, before anything is written, for weights that load_ptp would refuse.
    """
    folder = Path(folder)
    adapters, u_embed = to_save(folder, lora, dtype), to_save(folder, _u_tensors(embedding, late), dtype)
    file, shapes = folder / ADAPTER_WEIGHTS_FILE, _shapes(adapters)
    check_adapter_shapes(file, shapes, range(config.num_layers), config.lora_rank, config.hidden_size)
    _check_embedding(folder / U_EMBED_FILE, _shapes(u_embed), config)
    kept = Adapters(None, config.lora_rank, config.lora_alpha, module_names(adapters), adapters)
    adapter_files = kept.files(config.speculators_config.verifier.name_or_path)
    metadata = {"format": "pt", ADAPTER_DIGEST: adapter_digest(adapter_files), **_identity(config)}
    files = {
        U_EMBED_FILE: save(u_embed, metadata=metadata),
        **adapter_files,
        **closing_files(config, provenance, card),
    }
    write_folder(folder, files)


def load_ptp(folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> PtpHead:
    """The head in a folder; raises CheckpointError or HeadConfigError."""
    folder = Path(folder)
    config = of_method("ptp", folder, read_config(folder))
    _check_config(folder, config)
    u_embed = {name: tensor.to(device=device, dtype=dtype) for name, tensor in _embedding_tensors(folder, config)}
    lora = {name: tensor.to(device=device, dtype=dtype) for name, tensor in _lora_tensors(folder, config)}
    with torch.device("meta"):
        embedding, late = _build(config)
    ours = {name: u_embed.pop(name) for name in list(u_embed) if name.startswith(LATE)}
    embedding.load_state_dict(u_embed, assign=True)
    if late is not None:
        late.load_state_dict({name.removeprefix(LATE): value for name, value in ours.items()}, assign=True)
        late.eval().requires_grad_(False)
    return PtpHead(config, lora, embedding.eval().requires_grad_(False), late)


def load_student(folder: Path | str, target: Any) -> Student:
    """The head in a folder on its target (a `vllm_mtpc.hf.Target`), without gradients.

    Raises CheckpointError or HeadConfigError.
    """
    head = load_ptp(folder)
    student = Student(target, head.config)
    student.take(head.lora, head.embedding, head.late)
    return student.eval().requires_grad_(False)


def check_ptp(folder: Path | str, config: PtpConfig) -> AdapterInfo:
    """What the adapters of a PTP head are; raises CheckpointError unless every tensor of its files is as configured."""
    folder = Path(folder)
    modules = _check_config(folder, config)
    for _ in _embedding_tensors(folder, config):
        pass
    parameters = sum(tensor.numel() for _, tensor in _lora_tensors(folder, config))
    return AdapterInfo(list(range(config.num_layers)), config.lora_rank, config.lora_alpha, modules, parameters)


def _check_config(folder: Path, config: PtpConfig) -> list[str]:
    """Raise CheckpointError unless a folder has all files and they say the same; returns the adapted modules."""
    file = require_weights(folder, U_EMBED_FILE)
    check_files(folder, 'speculators_model_type "ptp"')
    modules = _read_adapter_config(folder / ADAPTER_CONFIG_FILE, config)
    with open_tensors(file) as handle:
        metadata = handle.metadata() or {}
    for key, value in _identity(config).items():
        if metadata.get(key) != value:
            raise CheckpointError(
                f"{file}: was trained with {key} {metadata.get(key)!r}, but config.json says {value!r}; correct "
                "config.json or copy the head again"
            )
    check_digest(folder, U_EMBED_FILE)
    return modules


def _read_adapter_config(file: Path, config: PtpConfig) -> list[str]:
    _, rank, alpha, modules = read_adapter_config(file, lambda layers: layers is None, "null, adapters on every layer")
    for key, given, ours, wanted in (
        ("r", rank, "lora_rank", config.lora_rank),
        ("lora_alpha", alpha, "lora_alpha", config.lora_alpha),
    ):
        if given != wanted:
            raise CheckpointError(f"{file}: {key} = {given}, but config.json says {ours}={wanted}; save the head again")
    if unknown := sorted(set(modules) - set(MODULES)):
        raise CheckpointError(
            f"{file}: target_modules has {', '.join(unknown)}; allowed: {', '.join(MODULES)}; save the head again"
        )
    with open_tensors(file.with_name(ADAPTER_WEIGHTS_FILE)) as handle:
        found = module_names(handle.keys())
    if found and found != modules:
        raise CheckpointError(
            f"{file}: target_modules is {', '.join(modules)}, but {ADAPTER_WEIGHTS_FILE} has adapters of "
            f"{', '.join(found)}; save the head again"
        )
    return modules


def _lora_tensors(folder: Path, config: PtpConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the adapters, each checked."""
    file = folder / ADAPTER_WEIGHTS_FILE
    return adapter_tensors(file, range(config.num_layers), config.lora_rank, config.hidden_size)


def _embedding_tensors(folder: Path, config: PtpConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the u-embedding and the late network, each checked."""
    file = folder / U_EMBED_FILE
    with open_tensors(file) as handle:
        shapes = stored_shapes(handle)
        _check_embedding(file, shapes, config)
        for name in sorted(shapes):
            yield name, checked(file, name, handle.get_tensor(name))


def _check_embedding(file: Path, shapes: Mapping[str, tuple[int, ...]], config: PtpConfig) -> None:
    with torch.device("meta"):
        expected = _shapes(_u_tensors(*_build(config)))
    check_names(file, set(shapes), set(expected))
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise CheckpointError(
                f"{file}: tensor {name!r} has shape {shapes[name]}; config.json (u_embedding, u_features, u_hidden, "
                f"late_width, hidden_size) asks for {shape}; correct it or save the head again"
            )


def _identity(config: PtpConfig) -> dict[str, str]:
    """What tells heads of the same shapes apart."""
    return {"variant": config.variant, "informed": str(config.informed).lower(), "u_embedding": config.u_embedding}


def _build(config: PtpConfig) -> tuple[AuxEmbedding, LateNetwork | None]:
    embedding = build_embedding(config.u_embedding, config.hidden_size, config.u_features, config.u_hidden)
    return embedding, build_late(config.hidden_size, config.late_width)


def _u_tensors(embedding: AuxEmbedding, late: LateNetwork | None) -> dict[str, Tensor]:
    """What `u_embed.safetensors` holds, by its names."""
    theirs = {} if late is None else {LATE + name: value for name, value in late.state_dict().items()}
    return {**embedding.state_dict(), **theirs}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
