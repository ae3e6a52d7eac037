"""Save and load PTP heads: PEFT's adapter files, `u_embed.safetensors`, and the files that every head has.

`u_embed.safetensors` holds the embedding of u and, under names that start with "late.", the late network if there is
one. Its metadata holds the digest of the adapters it was trained with, and the variant and the embedding, which no
shape shows. Files of two different heads in one folder are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.checkpoint import load
from vllm_mtpc.checkpoint.load import shapes_of
from vllm_mtpc.checkpoint.locate import U_EMBED_FILE, require_weights
from vllm_mtpc.checkpoint.save import to_save, write_folder
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import open_tensors
from vllm_mtpc.heads.adapters import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, Adapters
from vllm_mtpc.heads.ptp.embedding import AuxEmbedding, build_embedding
from vllm_mtpc.heads.ptp.late import LateNetwork, build_late
from vllm_mtpc.heads.ptp.student import Student

LATE = "late."  # prefix of the late network's tensors
IDENTITY = {"variant", "u_embedding"}  # settings by which heads of the same shapes differ


class PtpHead(NamedTuple):
    """A PTP head as it is on disk. `load_student` puts it on its target."""

    config: PtpConfig
    lora: dict[str, Tensor]  # PEFT's names
    embedding: AuxEmbedding  # eval mode, no gradients
    late: LateNetwork | None = None  # eval mode, no gradients


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
    """Write the folder of a PTP head as `vllm_mtpc.checkpoint.save_head`.

    Args:
        folder: Of the head.
        config: Of the head.
        lora: Adapters by PEFT's names ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight").
        embedding: Of u.
        provenance: For `provenance.json`.
        card: The text of `README.md`.
        dtype: Of the tensors on disk.
        late: The late network of variant "late".

    Raises:
        CheckpointError: `load_ptp` would reject the weights. Nothing is written.
    """
    folder = Path(folder)
    lora, u_embed = to_save(folder, lora, dtype), to_save(folder, _u_tensors(embedding, late), dtype)
    file, shapes = folder / ADAPTER_WEIGHTS_FILE, shapes_of(lora)
    load.check_adapter_shapes(file, shapes, range(config.num_layers), config.lora_rank, config.hidden_size)
    _check_embedding(folder / U_EMBED_FILE, shapes_of(u_embed), config)
    adapters = Adapters(None, config.lora_rank, config.lora_alpha, load.module_names(lora), lora)
    identity = config.model_dump(include=IDENTITY)
    write_folder(folder, U_EMBED_FILE, u_embed, adapters, config, provenance, card, **identity)


def load_ptp(folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> PtpHead:
    """Load a PTP head with tensors of `dtype` on `device`. Raises CheckpointError or HeadConfigError."""
    folder = Path(folder)
    config = load.require_method("ptp", folder, load.read_config(folder))
    adapters, stored = _read(folder, config)
    lora, u_embed = (
        {name: tensor.to(device, dtype) for name, tensor in tensors.items()} for tensors in (adapters.tensors, stored)
    )
    with torch.device("meta"):
        embedding, late = _build(config)
    embedding.load_state_dict({name: u_embed[name] for name in embedding.state_dict()}, assign=True)
    if late is not None:
        late.load_state_dict({name: u_embed[LATE + name] for name in late.state_dict()}, assign=True)
        late.eval().requires_grad_(False)
    return PtpHead(config, lora, embedding.eval().requires_grad_(False), late)


def load_student(folder: Path | str, target: Any) -> Student:
    """Load a PTP head onto `target`, a `vllm_mtpc.hf.Target`, without gradients; raises as `load_ptp`."""
    head = load_ptp(folder)
    student = Student(target, head.config)
    student.take(head.lora, head.embedding, head.late)
    return student.eval().requires_grad_(False)


def check_ptp(folder: Path | str, config: PtpConfig) -> Adapters:
    """`vllm_mtpc.checkpoint.check_tensors` of a PTP head."""
    return _read(Path(folder), config)[0]


def _read(folder: Path, config: PtpConfig) -> tuple[Adapters, dict[str, Tensor]]:
    file = require_weights(folder, U_EMBED_FILE)
    adapters = load.read_adapters(folder, config)
    if (adapters.rank, adapters.alpha) != (config.lora_rank, config.lora_alpha):
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG_FILE}: r = {adapters.rank}, lora_alpha = {adapters.alpha:g}, but config.json "
            f"has lora_rank={config.lora_rank}, lora_alpha={config.lora_alpha:g}; save the head again"
        )
    with open_tensors(file) as handle:
        metadata = handle.metadata()
    for key, value in config.model_dump(include=IDENTITY).items():
        if metadata.get(key) != value:
            has = f"was trained with {key} {metadata.get(key)!r}, but config.json has {value!r}"
            raise CheckpointError(f"{file}: {has}; correct config.json or copy the head again")
    return adapters, load.read_tensors(file, lambda shapes: _check_embedding(file, shapes, config))


def _check_embedding(file: Path, shapes: load.Shapes, config: PtpConfig) -> None:
    with torch.device("meta"):
        expected = shapes_of(_u_tensors(*_build(config)))
    source = "u_embedding, u_features, u_hidden, late_width, hidden_size"
    load.check_shapes(file, shapes, expected, source)


def _build(config: PtpConfig) -> tuple[AuxEmbedding, LateNetwork | None]:
    embedding = build_embedding(config.u_embedding, config.hidden_size, config.u_features, config.u_hidden)
    return embedding, build_late(config.hidden_size, config.late_width)


def _u_tensors(embedding: AuxEmbedding, late: LateNetwork | None) -> dict[str, Tensor]:
    late_tensors = {} if late is None else {LATE + name: value for name, value in late.state_dict().items()}
    return {**embedding.state_dict(), **late_tensors}
