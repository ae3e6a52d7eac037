"""The folder of a PTP head: PEFT's adapter files, `u_embed.safetensors`, and what every head has.

`u_embed.safetensors` has the embedding of u and, in names that start with "late.", the late network where there is one.
It names, in its metadata, the adapters it was trained with (their digest) and what no shape tells:
the variant and the embedding. A folder whose files are of two heads is refused, not served badly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.load import (
    AdapterInfo,
    Shapes,
    check_adapter_files,
    check_adapter_shapes,
    check_digest,
    check_shapes,
    module_names,
    of_method,
    read_adapter_config,
    read_adapters,
    read_config,
    read_tensors,
)
from vllm_mtpc.checkpoint.locate import U_EMBED_FILE, require_weights
from vllm_mtpc.checkpoint.save import to_save, write_folder
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
    lora, u_embed = to_save(folder, lora, dtype), to_save(folder, _u_tensors(embedding, late), dtype)
    file = folder / ADAPTER_WEIGHTS_FILE
    check_adapter_shapes(file, _shapes(lora), range(config.num_layers), config.lora_rank, config.hidden_size)
    _check_embedding(folder / U_EMBED_FILE, _shapes(u_embed), config)
    adapters = Adapters(None, config.lora_rank, config.lora_alpha, module_names(lora), lora)
    write_folder(folder, U_EMBED_FILE, u_embed, adapters, config, provenance, card, **_identity(config))


def load_ptp(folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> PtpHead:
    """The head in a folder; raises CheckpointError or HeadConfigError."""
    folder = Path(folder)
    config = of_method("ptp", folder, read_config(folder))
    _, u_embed, lora = _read(folder, config, dtype, device)
    with torch.device("meta"):
        embedding, late = _build(config)
    embedding.load_state_dict({name: u_embed[name] for name in embedding.state_dict()}, assign=True)
    if late is not None:
        late.load_state_dict({name: u_embed[LATE + name] for name in late.state_dict()}, assign=True)
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
    modules, _, lora = _read(Path(folder), config)
    parameters = sum(tensor.numel() for tensor in lora.values())
    return AdapterInfo(list(range(config.num_layers)), config.lora_rank, config.lora_alpha, modules, parameters)


def _read(
    folder: Path, config: PtpConfig, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """The adapted modules, the tensors of `u_embed.safetensors` and the adapters; raises CheckpointError.

    As they are stored, memory-mapped, where neither dtype nor device is asked for.
    """
    file = require_weights(folder, U_EMBED_FILE)
    check_adapter_files(folder, 'speculators_model_type "ptp"')
    modules = _adapted_modules(folder / ADAPTER_CONFIG_FILE, config)
    metadata = check_digest(folder, U_EMBED_FILE)
    for key, value in _identity(config).items():
        if metadata.get(key) != value:
            raise CheckpointError(
                f"{file}: was trained with {key} {metadata.get(key)!r}, but config.json says {value!r}; correct "
                "config.json or copy the head again"
            )
    embedding = read_tensors(file, lambda shapes: _check_embedding(file, shapes, config))
    adapters = folder / ADAPTER_WEIGHTS_FILE, range(config.num_layers), config.lora_rank, config.hidden_size
    u_embed, lora = (
        {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors}
        for tensors in (embedding, read_adapters(*adapters))
    )
    return modules, u_embed, lora


def _adapted_modules(file: Path, config: PtpConfig) -> list[str]:
    """As PEFT's config and the names of the adapters say; raises CheckpointError where config.json says otherwise."""
    _, rank, alpha, modules = read_adapter_config(file, lambda layers: layers is None, "null, adapters on every layer")
    if (rank, alpha) != (config.lora_rank, config.lora_alpha):
        raise CheckpointError(
            f"{file}: r = {rank}, lora_alpha = {alpha}, but config.json says lora_rank={config.lora_rank}, "
            f"lora_alpha={config.lora_alpha:g}; save the head again"
        )
    with open_tensors(file.with_name(ADAPTER_WEIGHTS_FILE)) as handle:
        found = module_names(handle.keys())
    if found and found != modules:
        raise CheckpointError(
            f"{file}: target_modules is {', '.join(modules)}, but {ADAPTER_WEIGHTS_FILE} has adapters of "
            f"{', '.join(found)}; allowed: {', '.join(MODULES)}; save the head again"
        )
    return modules


def _check_embedding(file: Path, shapes: Shapes, config: PtpConfig) -> None:
    with torch.device("meta"):
        expected = _u_tensors(*_build(config))
    check_shapes(file, shapes, expected, "u_embedding, u_features, u_hidden, late_width, hidden_size")


def _identity(config: PtpConfig) -> dict[str, str]:
    """What tells heads of the same shapes apart."""
    return {"variant": config.variant, "u_embedding": config.u_embedding}


def _build(config: PtpConfig) -> tuple[AuxEmbedding, LateNetwork | None]:
    embedding = build_embedding(config.u_embedding, config.hidden_size, config.u_features, config.u_hidden)
    return embedding, build_late(config.hidden_size, config.late_width)


def _u_tensors(embedding: AuxEmbedding, late: LateNetwork | None) -> dict[str, Tensor]:
    """What `u_embed.safetensors` holds, by its names."""
    theirs = {} if late is None else {LATE + name: value for name, value in late.state_dict().items()}
    return {**embedding.state_dict(), **theirs}


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
