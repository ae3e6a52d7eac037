"""What a byte-level model needs of the tokens before those it is given, kept next to transformers' key-value cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def grown(cache: Any, name: str, new: Tensor) -> Tensor:
    """`new`[B, m] behind what the cache holds of the tokens before, [B, past + m]; the cache holds it from now on.

    A cache that was cut back has fewer tokens than were kept: what is beyond them is forgotten. None: nothing is kept.
    """
    if cache is None:
        return new
    kept = getattr(cache, name, None)
    if kept is not None:
        new = torch.cat([kept[:, : cache.get_seq_length()], new], 1)
    setattr(cache, name, new)
    return new


def positions_of(tokens: Tensor, cache: Any) -> Tensor:
    """Positions [B, m] of tokens[B, m, ...] behind what is cached, where none are given."""
    past = 0 if cache is None else cache.get_seq_length()
    return torch.arange(past, past + tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
