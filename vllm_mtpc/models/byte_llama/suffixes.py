"""The longest known suffix of a text, for a batch of texts: pure torch, static shapes, no loops over tokens.

A table maps sequences of token ids, most recent first, to ids of subwords, by sorted polynomial hashes. The hashes of
all L suffixes of a row are one cumulative sum, their indices one binary search; each match is compared with its key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.models.byte_llama.config import TABLE

_BASE = 0x5851F42D4C957F2D  # an odd multiplier; powers wrap modulo 2**64
ABSENT = -1  # before the first token of a text


class SuffixTable(nn.Module):
    """Ids of subwords for the last L tokens of texts; the buffers are not saved.

    Args:
        subwords: key (most recent token first) to value.
        short: tokens after which only the key of that single token matches.
        max_length: L.

    Raises:
        CheckpointError: a key is longer than max_length, or two keys have one hash.
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
    count from 1: the model was trained with this off-by-one, so it is kept.

    Raises:
        CheckpointError: the entry is not such a table, or does not fit the config.
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
