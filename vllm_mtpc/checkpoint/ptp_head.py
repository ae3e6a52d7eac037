"""Save and load PTP heads: PEFT's adapter files, `u_embed.safetensors`, and the files that every head has.

`u_embed.safetensors` holds the `PtpLayers`. Its metadata holds the digest of the adapters they were trained with,
and the variant and the embedding, which no shape shows. Files of two different heads in one folder are rejected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.checkpoint import load
from vllm_mtpc.checkpoint.locate import U_EMBED_FILE, require_weights
from vllm_mtpc.checkpoint.save import to_save, write_folder
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import open_tensors
from vllm_mtpc.heads.adapters import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, Adapters
from vllm_mtpc.heads.ptp.layers import PtpHead, PtpLayers
from vllm_mtpc.heads.ptp.student import Student

IDENTITY = {"variant", "u_embedding"}  # settings that no shape shows


def save_ptp(
    folder: Path | str, head: PtpHead, provenance: dict[str, Any], card: str, dtype: torch.dtype = torch.float16
) -> None:
    """Write the folder of a PTP head, of float tensors; arguments as in `vllm_mtpc.checkpoint.save_head`.

    Raises:
        CheckpointError: `load_ptp` would reject the weights. Nothing is written.
    """
    folder, config = Path(folder), head.config
    lora, layers = (to_save(folder, tensors, dtype) for tensors in (head.lora, head.layers.state_dict()))
    file, shapes = folder / ADAPTER_WEIGHTS_FILE, load.shapes_of(lora)
    load.check_adapter_shapes(file, shapes, range(config.num_layers), config.lora_rank, config.hidden_size)
    _check_layers(folder / U_EMBED_FILE, load.shapes_of(layers), config)
    adapters = Adapters(None, config.lora_rank, config.lora_alpha, load.module_names(lora), lora)
    identity = config.model_dump(include=IDENTITY)
    write_folder(folder, U_EMBED_FILE, layers, adapters, config, provenance, card, **identity)


def load_ptp(folder: Path | str, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> PtpHead:
    """Load a PTP head with tensors of `dtype` on `device`. Raises CheckpointError or HeadConfigError."""
    folder = Path(folder)
    config = load.require_method("ptp", folder, load.read_config(folder))
    adapters, stored = _read(folder, config)
    with torch.device("meta"):
        layers = PtpLayers(config).eval().requires_grad_(False)
    layers.load_state_dict(stored, assign=True)
    lora = {name: value.to(device, dtype) for name, value in adapters.tensors.items()}
    return PtpHead(config, lora, layers.to(device, dtype))


def load_student(folder: Path | str, target: Any) -> Student:
    """Load a PTP head onto `target`, a `vllm_mtpc.hf.Target`, without gradients; raises as `load_ptp`."""
    head = load_ptp(folder)
    student = Student(target, head.config)
    student.take(head)
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
    return adapters, load.read_tensors(file, lambda shapes: _check_layers(file, shapes, config))


def _check_layers(file: Path, shapes: load.Shapes, config: PtpConfig) -> None:
    with torch.device("meta"):
        expected = load.shapes_of(PtpLayers(config).state_dict())
    load.check_shapes(file, shapes, expected, "u_features, late_width, hidden_size")
