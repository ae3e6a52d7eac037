"""A target in 8 or 4 bits, written as compressed-tensors writes it: a few small matrices need no quantiser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

SCHEME = {
    "dynamic": False,
    "num_bits": 8,
    "observer": "minmax",
    "strategy": "channel",
    "symmetric": True,
    "type": "int",
}


def quantise(source: Path, folder: Path, lm_head: bool = False) -> None:
    """The target of `source` with int8 weights (a scale per output row) and activations quantised token by token.

    lm_head: that of the target too, where it has one of its own.
    """
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if weight.dim() == 2 and (".layers." in name or (lm_head and name == "lm_head.weight")):
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[name.removesuffix("weight") + "weight_scale"] = scale
        else:
            tensors[name] = weight
    group = {
        "weights": SCHEME,
        "input_activations": {**SCHEME, "dynamic": True, "strategy": "token", "observer": None},
        "targets": ["Linear", "re:.*lm_head"] if lm_head else ["Linear"],
    }
    _write(source, folder, tensors, "int-quantized", group, [] if lm_head else ["lm_head"])


def quantise_weights(source: Path, folder: Path, group_size: int = 32) -> None:
    """The target of `source` with weights of 4 bits, a scale per `group_size` inputs, eight to an int32."""
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if ".layers." in name and weight.dim() == 2:
            grouped = weight.unflatten(1, (-1, group_size))
            scale = grouped.abs().amax(2, keepdim=True) / 7
            stem = name.removesuffix("weight")
            tensors[stem + "weight_packed"] = pack_to_int32((grouped / scale).round().flatten(1).to(torch.int8), 4)
            tensors[stem + "weight_scale"] = scale[..., 0].bfloat16()
            tensors[stem + "weight_shape"] = torch.tensor(weight.shape)
        else:
            tensors[name] = weight
    scheme = {**SCHEME, "num_bits": 4, "strategy": "group", "group_size": group_size}
    _write(source, folder, tensors, "pack-quantized", {"weights": scheme, "targets": ["Linear"]}, ["lm_head"])


def _write(
    source: Path, folder: Path, tensors: dict[str, torch.Tensor], layout: str, group: dict[str, Any], ignore: list[str]
) -> None:
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
