"""Find out whether vLLM serves MTP layers of a target, before any engine starts."""

from __future__ import annotations

import copy
from typing import Any, get_args

from vllm_mtpc.errors import UsageError, first_line


def count_mtp_layers(engine: dict[str, Any]) -> int:
    """Return the number of MTP layers that a target bundles and vLLM serves (`method: mtp`).

    Args:
        engine: keyword arguments of `vllm.LLM`, `model` among them.

    Raises:
        UsageError: vLLM cannot read the target's config.
    """
    from vllm.config.speculative import MTPModelTypes, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

    try:
        target = EngineArgs(**engine).create_model_config().hf_config
    except Exception as error:  # of many kinds, also from transformers
        raise UsageError(f"target {engine['model']}: vLLM cannot read it: {first_line(error)}") from None
    try:
        config = SpeculativeConfig.hf_config_override(copy.deepcopy(target))
    except ValueError:  # a model that may have MTP layers, and this one has none
        return 0
    return (getattr(config, "n_predict", None) or 0) if config.model_type in get_args(MTPModelTypes) else 0
