"""Byte-level targets that transformers does not have, as models of its kind: EvaByte and Byte-Llama.

vLLM serves them by `vllm_mtpc.models`; these are for training and evaluation. Their repositories' own code is never
run.
"""

from __future__ import annotations

from functools import cache


@cache
def register() -> None:
    """Lets transformers' Auto classes find both."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from vllm_mtpc.hf.bytes.byte_llama import ByteLlamaForCausalLM
    from vllm_mtpc.hf.bytes.evabyte import EvaByteForCausalLM

    for model in (ByteLlamaForCausalLM, EvaByteForCausalLM):
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)
