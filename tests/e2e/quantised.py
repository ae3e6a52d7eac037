"""A target in 8 bits, written as compressed-tensors writes it: no quantiser is needed for a few small matrices."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SCHEME = {
    "dynamic": False,
    "num_bits": 8,
    "observer": "minmax",
    "strategy": "channel",
    "symmetric": True,
    "type": "int",
}


def quantise(source: Path, folder: Path) -> None:
    """The target of `source` with int8 weights (a scale per output row) and activations quantised token by token."""
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if ".layers." in name and weight.dim() == 2:
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[name.removesuffix("weight") + "weight_scale"] = scale
        else:
            tensors[name] = weight
    group = {
        "weights": SCHEME,
        "input_activations": {**SCHEME, "dynamic": True, "strategy": "token", "observer": None},
        "targets": ["Linear"],
    }
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
