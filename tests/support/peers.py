"""A target with an MTP layer, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM


def make_mimo(folder: Path) -> None:
    """A random MiMo: Qwen2's layers, and an MTP layer that is a copy of the last one."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config = Qwen2Config(
        **sizes, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.15,
        bos_token_id=None, eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    weights, last, own = load_file(folder / "model.safetensors"), "model.layers.1.", "model.mtp_layers.0."
    weights |= {own + name.removeprefix(last): value.clone() for name, value in weights.items() if last in name}
    size = config.hidden_size
    weights |= {f"{own}{name}_layernorm.weight": torch.ones(size) for name in ("token", "hidden", "final")}
    weights[f"{own}input_proj.weight"] = torch.cat([torch.eye(size), torch.eye(size)], 1) / 2
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    change(folder, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)


def change(folder: Path, **more: object) -> None:
    """More of a config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
