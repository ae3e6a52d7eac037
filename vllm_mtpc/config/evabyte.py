"""The transformers config of EvaByte, and the options that this implementation supports."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from vllm_mtpc.errors import ServeConfigError

# Options of the original code with the only supported value, which all published checkpoints have.
_ONLY = {
    "attention_class": "eva",
    "norm_add_unit_offset": True,
    "attention_bias": False,
    "num_chunks": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_DEFAULTS = {  # EvaByte-6.5B
    "vocab_size": 320,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_pred_heads": 8,
    "window_size": 2048,
    "chunk_size": 16,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
}


class EvaByteConfig(PretrainedConfig):
    """The config of an EvaByte. Other keys of the original config are kept."""

    model_type = "evabyte"

    def __init__(
        self,
        num_key_value_heads: int | None = None,
        rope_parameters: dict[str, Any] | None = None,
        tie_word_embeddings: bool = False,
        **others: Any,
    ) -> None:
        for name, default in _DEFAULTS.items():
            setattr(self, name, others.pop(name, default))
        self.num_key_value_heads = num_key_value_heads or self.num_attention_heads
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": self.rope_theta}
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)


def check_config(config: EvaByteConfig) -> None:
    """Raise ServeConfigError for options of the original code that are not supported."""
    for name, value in _ONLY.items():
        given = getattr(config, name, value)
        if given != value:
            raise ServeConfigError(f"EvaByte with {name}={given!r} is not served; allowed: {value!r}")
    if config.num_key_value_heads != config.num_attention_heads:
        raise ServeConfigError(
            f"EvaByte with num_key_value_heads={config.num_key_value_heads}: EVA has one key head per query head; "
            f"allowed: {config.num_attention_heads}"
        )
    if config.window_size % config.chunk_size:
        raise ServeConfigError(
            f"EvaByte with window_size={config.window_size}, chunk_size={config.chunk_size}: allowed: "
            "multiples of chunk_size"
        )
