"""Targets of other families with random weights, and quantised targets, that are made in a second."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"vocab_size": 48, "max_position_embeddings": 128}
GROUPED = SIZES | {"num_key_value_heads": 1, "head_dim": 32}
CAPPED = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 16}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", GROUPED),
    "Qwen3": ("Qwen3Config", GROUPED | {"tie_word_embeddings": True}),
    "Gemma2": ("Gemma2Config", GROUPED | CAPPED),
    "GPTNeoX": ("GPTNeoXConfig", SIZES | {"num_attention_heads": 1}),
    "HyperCLOVAX": ("HyperCLOVAXConfig", GROUPED | {"logits_scaling": 4.0}),
    "MiniCPM3": ("MiniCPM3Config", SIZES | LATENT | {"dim_model_base": 8}),  # states divided by 4 before the lm_head
}
MAMBA = GROUPED | {"num_hidden_layers": 4, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 32}
MAMBA |= {"mamba_n_groups": 1, "num_attention_heads": 1}
KINDS = ["mamba", "mamba", "attention", "mamba"]
DELTA = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 128}
DELTA |= {"linear_value_head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA |= {"shared_expert_intermediate_size": 32, "layer_types": [*["linear_attention"] * 3, "full_attention"]}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "FalconH1": ("FalconH1Config", MAMBA | {"mamba_d_ssm": 64}),
    "GraniteMoeHybrid": (
        "GraniteMoeHybridConfig",
        MAMBA | {"layer_types": KINDS, "num_local_experts": 0, "shared_intermediate_size": 64},
    ),
    "Qwen3Next": ("Qwen3NextConfig", GROUPED | {"num_hidden_layers": 4} | DELTA),
}
INT8 = preset_name_to_scheme("W8A8", ["Linear", "re:.*lm_head"])
INT4 = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, group_size=32))


def make_family(name: str, folder: Path) -> Path:
    """Write a target of a family in float32; its states depend on all tokens before them."""
    return make_random(*(FAMILIES | HYBRIDS)[name], folder)


def make_random(config: str, sizes: dict[str, Any], folder: Path) -> Path:
    """Write a target of a config's class in float32, with random weights."""
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**sizes))
    with torch.no_grad():
        for parameter in made.parameters():  # initial weights of 0.02 leave hardly anything to compare
            parameter.add_(0.15 * torch.randn_like(parameter))
    made.generation_config.eos_token_id = None
    made.save_pretrained(folder)
    return folder


def quantise(source: Path, folder: Path, scheme: QuantizationScheme, ignore: tuple[str, ...] = ("lm_head",)) -> None:
    """As compressed-tensors does; the scale of a row or a group is that of its largest weight."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=list(ignore)))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            grouped = module.weight.unflatten(1, (-1, scheme.weights.group_size or module.in_features))
            scale, _ = calculate_qparams(grouped.amin(2), grouped.amax(2), scheme.weights)
            module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    for file in source.glob("tokenizer*"):
        shutil.copy(file, folder)
