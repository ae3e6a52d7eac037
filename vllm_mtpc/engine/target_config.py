"""What vLLM makes of a target's config, before any engine starts."""

from __future__ import annotations

import copy
from typing import Any, get_args

from vllm_mtpc.errors import UsageError, first_line


def read_model_config(engine: dict[str, Any]) -> Any:
    """Return vLLM's ModelConfig of the engine's target.

    Args:
        engine: keyword arguments of `vllm.LLM`, `model` among them.

    Raises:
        UsageError: vLLM cannot read the target's config.
    """
    from vllm.engine.arg_utils import EngineArgs

    try:
        return EngineArgs(**engine).create_model_config()
    except Exception as error:  # of many kinds, also from transformers
        raise UsageError(f"target {engine['model']}: vLLM cannot read it: {first_line(error)}") from None


def resolve_dtype(engine: dict[str, Any]) -> str:
    """Return the dtype of the engine's target, as vLLM chooses it for "auto"."""
    dtype = engine.get("dtype", "auto")
    if dtype != "auto":
        return dtype
    arguments = {key: value for key, value in engine.items() if key != "speculative_config"}
    return str(read_model_config(arguments).dtype).removeprefix("torch.")


def count_mtp_layers(engine: dict[str, Any]) -> int:
    """Return the number of MTP layers that a target bundles and vLLM serves (`method: mtp`)."""
    from vllm.config.speculative import MTPModelTypes, SpeculativeConfig

    target = read_model_config(engine).hf_config
    try:
        config = SpeculativeConfig.hf_config_override(copy.deepcopy(target))
    except ValueError:  # a model that may have MTP layers, and this one has none
        return 0
    return (getattr(config, "n_predict", None) or 0) if config.model_type in get_args(MTPModelTypes) else 0
