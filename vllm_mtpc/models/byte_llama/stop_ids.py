"""Stop ids of a byte-level Llama: drops those of the subword model that generation_config.json may still list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_mtpc.proposers.patches.patch import patch

MODEL_TYPE = "tpu_llama"


@patch("vllm.config.model", "ModelConfig.try_get_generation_config", needs=("self",))
def try_get_generation_config(original: Callable[..., Any], self: Any) -> dict[str, Any]:
    """Drop stop ids of the subword model, which crash the engine once min_tokens is asked for."""
    values = original(self)
    if getattr(self.hf_config, "model_type", None) != MODEL_TYPE:
        return values
    from vllm_mtpc.config.byte_llama import known_ids

    ids = {"bos_token_id", "eos_token_id", "pad_token_id"} & values.keys()
    return values | {name: known_ids(values[name], self.hf_config.vocab_size) for name in ids}
