"""Registers the models of this package with vLLM, each registry when vLLM imports it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from vllm_mtpc.models.byte_llama import stop_ids
from vllm_mtpc.proposers.patches.patch import apply, when_imported

ARCHITECTURES = {
    "EvaByteForCausalLM": "vllm_mtpc.models.evabyte.model:EvaByteForCausalLM",
    "TPULlamaForCausalLM": "vllm_mtpc.models.byte_llama.model:ByteLlamaForCausalLM",
}


def register() -> None:
    """Register everything; a second call has no effect."""
    apply(stop_ids.try_get_generation_config)
    for module, fill in (
        ("vllm.model_executor.models.registry", _models),
        ("vllm.transformers_utils.config", _configs),
        ("vllm.model_executor.models.config", _hooks),
        ("vllm.tokenizers.registry", _tokenizers),
        ("vllm.renderers.registry", _renderers),
    ):
        when_imported(module, functools.partial(_without_raising, fill))


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

    from vllm_mtpc.config.byte_llama import ByteLlamaConfig
    from vllm_mtpc.config.evabyte import EvaByteConfig

    for config in (ByteLlamaConfig, EvaByteConfig):
        module._CONFIG_REGISTRY[config.model_type] = config


def _hooks() -> None:
    from vllm.model_executor.models import config as module

    from vllm_mtpc.models.hooks import ByteLlamaHook, EvaByteHook

    module.MODELS_CONFIG_MAP.update(EvaByteForCausalLM=EvaByteHook, TPULlamaForCausalLM=ByteLlamaHook)


def _tokenizers() -> None:
    from vllm.tokenizers.registry import TokenizerRegistry

    TokenizerRegistry.tokenizers["evabyte"] = ("vllm_mtpc.models.evabyte.tokenizer", "EvaByteTokenizer")


def _renderers() -> None:
    from vllm.renderers.registry import RENDERER_REGISTRY

    RENDERER_REGISTRY.renderers["evabyte"] = ("vllm.renderers.hf", "HfRenderer")
