"""Registers the models of this package with vLLM, each registry when vLLM imports it, and with transformers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from vllm_mtpc.proposers.patches.patch import apply, patch, when_imported

ARCHITECTURES = {
    "EvaByteForCausalLM": "vllm_mtpc.models.evabyte.vllm_model:EvaByteForCausalLM",
    "TPULlamaForCausalLM": "vllm_mtpc.models.byte_llama.vllm_model:ByteLlamaForCausalLM",
}


@patch("vllm.config.model", "ModelConfig.try_get_generation_config", needs=("self",))
def try_get_generation_config(original: Callable[..., Any], self: Any) -> dict[str, Any]:
    """Drop stop ids of a byte-level Llama's subword model, which crash the engine once min_tokens is asked for."""
    values = original(self)
    if getattr(self.hf_config, "model_type", None) != "tpu_llama":
        return values
    from vllm_mtpc.models.byte_llama.config import known_ids

    ids = {"bos_token_id", "eos_token_id", "pad_token_id"} & values.keys()
    return values | {name: known_ids(values[name], self.hf_config.vocab_size) for name in ids}


def register() -> None:
    """Register everything with vLLM; a second call has no effect."""
    apply(try_get_generation_config)
    for module, fill in (
        ("vllm.model_executor.models.registry", _models),
        ("vllm.transformers_utils.config", _configs),
        ("vllm.model_executor.models.config", _hooks),
        ("vllm.tokenizers.hf", _tokenizer),
    ):
        when_imported(module, functools.partial(_without_raising, fill))


def register_with_transformers() -> None:
    """Register everything with transformers, for training and evaluation; a second call has no effect."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from vllm_mtpc.models.transformers_models import ByteLlamaForCausalLM, EvaByteForCausalLM

    for model in (ByteLlamaForCausalLM, EvaByteForCausalLM):
        AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        AutoModelForCausalLM.register(model.config_class, model, exist_ok=True)
    _tokenizer()


def _without_raising(fill: Callable[[], None]) -> None:
    """Log an exception: raised here, it would break every import of vLLM."""
    try:
        fill()
    except Exception:
        logging.getLogger("vllm.mtpc").exception("the models of vllm_mtpc could not be registered with this vLLM")


def _models() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture, name in ARCHITECTURES.items():
        ModelRegistry.register_model(architecture, name)


def _configs() -> None:
    from vllm.transformers_utils import config as module

    from vllm_mtpc.models.byte_llama.config import ByteLlamaConfig
    from vllm_mtpc.models.evabyte.config import EvaByteConfig

    for config in (ByteLlamaConfig, EvaByteConfig):
        module._CONFIG_REGISTRY[config.model_type] = config


def _hooks() -> None:
    from vllm.model_executor.models import config as module

    from vllm_mtpc.models.hooks import ByteLlamaHook, EvaByteHook

    module.MODELS_CONFIG_MAP.update(EvaByteForCausalLM=EvaByteHook, TPULlamaForCausalLM=ByteLlamaHook)


def _tokenizer() -> None:
    from transformers import AutoTokenizer

    from vllm_mtpc.models.evabyte.config import EvaByteConfig, EvaByteTokenizer

    AutoTokenizer.register(EvaByteConfig, fast_tokenizer_class=EvaByteTokenizer, exist_ok=True)
