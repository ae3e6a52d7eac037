"""The adapters of an MtPC checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_mtpc.checkpoint.adapters import check_adapter_shapes, module_names
from vllm_mtpc.checkpoint.convert.yaml import Settings
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.heads.adapters import ALLOWED_LAYERS, MODULES, Adapters

SECTION = "adaptor.hyperparameters"
_KEYS = ("layers_to_transform", "lora_alpha", "lora_dropout", "r", "target_modules")
_NAME = re.compile(
    r"_lm\.(?P<inner>base_model\.model\.(?:\w+\.)*layers\.(?P<layer>\d+)\.[\w.]*?(?P<module>\w+)\.lora_[AB])"
    r"(?:\.default)?\.weight"
)


def stored_adapters(
    path: Path, lora: Mapping[str, Tensor], settings: Settings, target: Mapping[str, Any]
) -> Adapters | None:
    """The adapters of a checkpoint, None without; raises CheckpointError where they are not of the last layers."""
    given = settings.section(SECTION, _KEYS)
    if not lora and not given:
        return None
    rank, alpha = given.get("r"), given.get("lora_alpha")
    if not lora or type(rank) is not int or type(alpha) not in (int, float) or alpha <= 0:
        has = f"{len(lora)} adapter tensors"
        raise CheckpointError(
            f"{path}: has {has}, but config.yaml says {SECTION}: r = {rank}, lora_alpha = {alpha}; keep the checkpoint "
            "and its own config.yaml together"
        )
    tensors, layers = {}, set()
    for name, value in lora.items():
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in MODULES:
            raise CheckpointError(
                f"{path}: lm.{name} is no adapter of draft layers; allowed: lora_A and lora_B of {', '.join(MODULES)}"
            )
        tensors[f"{match['inner']}.weight"] = value
        layers.add(int(match["layer"]))
    ordered = sorted(layers)
    _check_layers(path, ordered, given.get("layers_to_transform"), target.get("num_hidden_layers"))
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    check_adapter_shapes(path, shapes, ordered, rank, target["hidden_size"])
    return Adapters(ordered, rank, alpha, module_names(tensors), tensors)


def _check_layers(path: Path, layers: list[int], stated: Any, total: int | None) -> None:
    last = layers[-1] if total is None else total - 1
    expected = list(range(last - len(layers) + 1, last + 1))
    if layers != expected or len(layers) not in ALLOWED_LAYERS or stated not in (None, layers):
        allowed = f"the last {', '.join(map(str, ALLOWED_LAYERS))} layers of the target"
        raise CheckpointError(
            f"{path}: adapters on layers {layers} of {total}, config.yaml says {stated}; allowed: {allowed}, and the "
            "same in both; name the target it was trained on"
        )
