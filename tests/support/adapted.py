"""PEFT's own model of a tiny Llama with random adapters."""

from __future__ import annotations

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_mtpc.heads.adapters import MODULES

SIZES = dict(vocab_size=7, hidden_size=8, intermediate_size=12, num_hidden_layers=3)
LLAMA = LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1, head_dim=4)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA).eval().requires_grad_(False)


def adapted_llama(seed: int = 0, layers: list[int] | None = None, **lora: float) -> PeftModel:
    """`llama` with adapters of rank 2 on some layers or all."""
    config = LoraConfig(r=2, target_modules=list(MODULES), layers_to_transform=layers, **lora)
    model = get_peft_model(llama(), config).eval()
    torch.manual_seed(seed)
    for name, value in model.named_parameters():
        if ".lora_" in name:
            value.data.normal_()
    return model
