"""Token ids and positions that byte-level targets store on the key-value cache of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def append_cached(cache: Any, name: str, new: Tensor) -> Tensor:
    """Append `new`[B, m] to the values stored as `name` on a cache, if any, and return all of them, [B, past + m]."""
    if cache is None:
        return new
    if (kept := getattr(cache, name, None)) is not None:
        new = torch.cat([kept, new], 1)
    setattr(cache, name, new)
    return new


def positions_of(tokens: Tensor, cache: Any) -> Tensor:
    """Return the default positions [B, m] of tokens[B, m, ...] after the cached ones."""
    past = 0 if cache is None else cache.get_seq_length()
    return torch.arange(past, past + tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
