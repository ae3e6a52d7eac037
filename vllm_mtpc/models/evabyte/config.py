"""The config of EvaByte as transformers knows it, and what this implementation of it takes."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from vllm_mtpc.errors import ServeConfigError

# Options of the original code, and the one value of each that is implemented (every published checkpoint has it).
_ONLY = {
    "attention_class": "eva",
    "norm_add_unit_offset": True,
    "attention_bias": False,
    "num_chunks": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


class EvaByteConfig(PretrainedConfig):
    """Sizes of an EvaByte; defaults are EvaByte-6.5B's. Keys of the original config that are not named are kept."""

    model_type = "evabyte"

    def __init__(
        self,
        vocab_size: int = 320,
        hidden_size: int = 4096,
        intermediate_size: int = 11008,
        num_hidden_layers: int = 32,
        num_attention_heads: int = 32,
        num_key_value_heads: int | None = None,
        num_pred_heads: int = 8,
        window_size: int = 2048,
        chunk_size: int = 16,
        max_position_embeddings: int = 32768,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 100000.0,
        rope_parameters: dict[str, Any] | None = None,
        hidden_act: str = "silu",
        tie_word_embeddings: bool = False,
        **others: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.num_pred_heads = num_pred_heads
        self.window_size = window_size
        self.chunk_size = chunk_size
        self.max_position_embeddings = max_position_embeddings
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": rope_theta}
        self.hidden_act = hidden_act
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)


def check_config(config: EvaByteConfig) -> None:
    """Raise ServeConfigError for a variant of EvaByte that the original code has and this one has not."""
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
            f"EvaByte with window_size={config.window_size}, chunk_size={config.chunk_size}: a window is whole "
            "chunks; allowed: multiples of chunk_size"
        )
