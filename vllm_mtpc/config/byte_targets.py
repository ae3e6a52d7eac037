"""The transformers configs of byte-level targets, Byte-Llama and EvaByte, and the options that are supported."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, PretrainedConfig

from vllm_mtpc.errors import CheckpointError, ServeConfigError
from vllm_mtpc.kernels.suffixes import SuffixTable, read_table

TABLE = "expand_input_ids_dict"


class ByteLlamaConfig(LlamaConfig):
    """LlamaConfig with the fields of the input expansion.

    The table (5 MB of JSON in config.json) is dropped, because vLLM copies, pickles, hashes and logs configs. Stop ids
    that are not in the vocabulary (they are the subword model's) are dropped, too.
    """

    model_type = "tpu_llama"

    def __init__(self, **given: Any) -> None:
        given.pop(TABLE, None)
        sizes = dict.fromkeys(("expand_input_ids_maxlen", "expand_input_ids_vocab_size"))
        super().__init__(**{"expand_input_ids": False, "add_qk_norm": False} | sizes | given)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, name, known_ids(getattr(self, name, None), self.vocab_size))


def known_ids(ids: int | list[int] | None, vocab_size: int) -> int | list[int] | None:
    """Return the token ids of a config that are in the vocabulary, None if there are none."""
    if isinstance(ids, list):
        return [index for index in ids if index < vocab_size] or None
    return ids if ids is not None and ids < vocab_size else None


def build_suffixes(entry: Any, config: Any) -> SuffixTable:
    """Return the subwords in the entry TABLE of a config.json, for a ByteLlamaConfig. Raises CheckpointError."""
    subwords, short = read_table(entry)
    if max(subwords.values(), default=0) >= config.expand_input_ids_vocab_size:
        raise CheckpointError(f"{TABLE} names subwords beyond expand_input_ids_vocab_size; restore config.json")
    return SuffixTable(subwords, short, config.expand_input_ids_maxlen)


def check_byte_llama(config: ByteLlamaConfig) -> None:
    """Raise ServeConfigError unless the config is that of a byte-level Llama with an expanded input."""
    if not (config.expand_input_ids and config.expand_input_ids_maxlen and config.expand_input_ids_vocab_size):
        raise ServeConfigError(
            "a tpu_llama without expand_input_ids, expand_input_ids_maxlen and expand_input_ids_vocab_size is a plain "
            'Llama; write "architectures": ["LlamaForCausalLM"], "model_type": "llama" into its config.json'
        )
    if config.add_qk_norm:
        raise ServeConfigError("a tpu_llama with add_qk_norm=true is not served; allowed: false")


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
    "tie_word_embeddings": False,
}


class EvaByteConfig(PretrainedConfig):
    """The config of an EvaByte. Other keys of the original config are kept."""

    model_type = "evabyte"

    def __init__(self, **given: Any) -> None:
        values = _DEFAULTS | given
        values["num_key_value_heads"] = values.get("num_key_value_heads") or values["num_attention_heads"]
        rope = {"rope_type": "default", "rope_theta": values["rope_theta"]}
        super().__init__(**values | {"rope_parameters": values.get("rope_parameters") or rope})


def check_evabyte(config: EvaByteConfig) -> None:
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
