"""The config of a byte-level Llama, and the options that are supported."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

from vllm_mtpc.errors import ServeConfigError

TABLE = "expand_input_ids_dict"


class ByteLlamaConfig(LlamaConfig):
    """LlamaConfig with the fields of the input expansion.

    The table (5 MB of JSON in config.json) is dropped, because vLLM copies, pickles, hashes and logs configs. Stop ids
    that are not in the vocabulary (they are the subword model's) are dropped, too.
    """

    model_type = "tpu_llama"

    def __init__(self, **options: Any) -> None:
        options.pop(TABLE, None)
        sizes = dict.fromkeys(("expand_input_ids_maxlen", "expand_input_ids_vocab_size"))
        super().__init__(**{"expand_input_ids": False, "add_qk_norm": False} | sizes | options)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, name, known_ids(getattr(self, name, None), self.vocab_size))


def known_ids(ids: int | list[int] | None, vocab_size: int) -> int | list[int] | None:
    """Return the token ids of a config that are in the vocabulary, None if there are none."""
    if isinstance(ids, list):
        return [index for index in ids if index < vocab_size] or None
    return ids if ids is not None and ids < vocab_size else None


def check_byte_llama(config: ByteLlamaConfig) -> None:
    """Raise ServeConfigError unless the config is that of a byte-level Llama with an expanded input."""
    if not (config.expand_input_ids and config.expand_input_ids_maxlen and config.expand_input_ids_vocab_size):
        raise ServeConfigError(
            "a tpu_llama without expand_input_ids, expand_input_ids_maxlen and expand_input_ids_vocab_size is a plain "
            'Llama; write "architectures": ["LlamaForCausalLM"], "model_type": "llama" into its config.json'
        )
    if config.add_qk_norm:
        raise ServeConfigError("a tpu_llama with add_qk_norm=true is not served; allowed: false")
