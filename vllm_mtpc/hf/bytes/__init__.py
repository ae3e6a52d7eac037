"""Byte-level targets that transformers does not have: EvaByte and Byte-Llama.

Training and evaluation use these models; vLLM serves `vllm_mtpc.models`. Code in a model's repository is never run.
"""

from __future__ import annotations

from functools import cache


@cache
def register() -> None:
    """Register both models with transformers' Auto classes."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from vllm_mtpc.hf.bytes.byte_llama import ByteLlamaForCausalLM
    from vllm_mtpc.hf.bytes.evabyte import EvaByteForCausalLM

    for model in (ByteLlamaForCausalLM, EvaByteForCausalLM):
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)
