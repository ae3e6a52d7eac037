"""The config of a byte-level Llama, and its table of subwords: pure torch, static shapes, no loops over tokens.

The table maps sequences of token ids, most recent first, to ids of subwords, by sorted polynomial hashes. The hashes of
all L suffixes of a row are one cumulative sum, their indices one binary search; each match is compared with its key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from vllm_mtpc.errors import CheckpointError, ServeConfigError

TABLE = "expand_input_ids_dict"
_BASE = 0x5851F42D4C957F2D  # an odd multiplier; powers wrap modulo 2**64
ABSENT = -1  # before the first token of a text


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


class SuffixTable(nn.Module):
    """Ids of subwords for the last L = max_length tokens of texts; the buffers are not saved.

    A key of `subwords` begins with the most recent token. After a token of `short` only the key of that single token
    matches. Raises CheckpointError for a key longer than L, and for two keys of one hash.
    """

    def __init__(self, subwords: Mapping[tuple[int, ...], int], short: Collection[int], max_length: int) -> None:
        super().__init__()
        if any(not 0 < len(key) <= max_length for key in subwords):
            raise CheckpointError(f"{TABLE}: a key has more than {max_length} tokens; restore config.json")
        powers = torch.tensor([1, *[_BASE] * (max_length - 1)]).cumprod(0)
        keys = torch.tensor([[*key, *[ABSENT] * (max_length - len(key))] for key in subwords])
        hashes, order = ((keys + 1) * powers).sum(1).sort()
        if (hashes[1:] == hashes[:-1]).any():
            raise CheckpointError(f"two keys of {TABLE} have one hash; this version cannot read the table")
        self.register_buffer("powers", powers, persistent=False)  # [L]
        self.register_buffer("hashes", hashes, persistent=False)  # [keys]
        self.register_buffer("keys", keys[order].to(torch.int16), persistent=False)  # [keys, L]
        values = torch.tensor(list(subwords.values()), dtype=torch.int64)
        self.register_buffer("values", values[order], persistent=False)
        self.register_buffer("short", torch.tensor(sorted(short), dtype=torch.int64), persistent=False)

    def forward(self, context: Tensor) -> Tensor:
        """Return the subwords [T] (0: none) of context [T, L] int64: the last L ids, most recent first, or ABSENT."""
        length = context.shape[1]
        hashes = ((context + 1) * self.powers).cumsum(1)  # [T, L], of the suffixes of 1 .. L tokens
        place = torch.searchsorted(self.hashes, hashes).clamp(max=len(self.hashes) - 1)
        is_beyond = torch.ones(length, length, dtype=torch.bool, device=context.device).triu(1)
        suffixes = context.to(torch.int16)[:, None].masked_fill(is_beyond, ABSENT)  # [T, suffix, L]
        is_key = (self.keys[place] == suffixes).all(-1)
        is_key[:, 1:] &= ~torch.isin(context[:, :1], self.short)
        longest = (is_key * torch.arange(1, length + 1, device=context.device)).argmax(1, keepdim=True)
        return torch.where(is_key.any(1), self.values[place.gather(1, longest)][:, 0], 0)


def build_suffixes(entry: Any, config: Any) -> SuffixTable:
    """Return the table in the entry `expand_input_ids_dict` of a config.json, for a ByteLlamaConfig.

    The file counts ids from 1 in keys and values. Its list of special ids counts from 0, but is compared with ids that
    count from 1: the model was trained with this off-by-one, so it is kept. Raises CheckpointError for another entry,
    also for one that does not fit the config.
    """
    try:
        named, special = entry
        subwords = {tuple(int(part) - 1 for part in key.split(",")): value - 1 for key, value in named.items() if key}
        short = {int(index) - 1 for index in special}
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError(
            f'{TABLE} of config.json is not [{{"1,2,3": 4, ...}}, [5, ...]]; restore config.json'
        ) from None
    if max(subwords.values(), default=0) >= config.expand_input_ids_vocab_size:
        raise CheckpointError(f"{TABLE} names subwords beyond expand_input_ids_vocab_size; restore config.json")
    return SuffixTable(subwords, short, config.expand_input_ids_maxlen)
