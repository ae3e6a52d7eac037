"""The config of an EvaByte, and the options that are supported."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from vllm_mtpc.errors import ServeConfigError

GPU_BLOCK = 256  # tokens; its summaries fill a page of FlashAttention for chunks of up to 16 tokens
DEFAULT_EOS = 2
DEFAULTS = {  # EvaByte-6.5B, where it is not LlamaConfig's
    "vocab_size": 320,
    "num_pred_heads": 8,
    "window_size": 2048,
    "chunk_size": 16,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
}
# Options of the original code with the only supported value, which all published checkpoints have.
SUPPORTED = {
    "attention_class": "eva",
    "norm_add_unit_offset": True,
    "attention_bias": False,
    "num_chunks": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


class EvaByteConfig(LlamaConfig):
    """The config of an EvaByte. Other keys of the original config are kept."""

    model_type = "evabyte"

    def __init__(self, **options: Any) -> None:
        super().__init__(**DEFAULTS | options)


def check_evabyte(config: EvaByteConfig) -> None:
    """Raise ServeConfigError for options of the original code that are not supported."""
    allowed = SUPPORTED | {"num_key_value_heads": config.num_attention_heads}  # EVA has one key head per query head
    for name, value in allowed.items():
        if (found := getattr(config, name, value)) != value:
            raise ServeConfigError(f"EvaByte with {name}={found!r} is not served; allowed: {value!r}")
    if config.window_size % config.chunk_size:
        raise ServeConfigError(
            f"EvaByte with window_size={config.window_size}, chunk_size={config.chunk_size}: allowed: "
            "multiples of chunk_size"
        )
