"""The draft vocabulary of a new head: the most frequent ids of the text that it is trained on (FR-Spec, 2502.14856)."""

from __future__ import annotations

import torch
from torch import Tensor

ALL_IDS = 16_384  # largest vocabulary of a target that is drafted whole by default
FEWEST, COVERAGE = 8_192, 0.99  # of the default


def choose_ids(tokens: Tensor, vocab_size: int, size: int | None) -> Tensor | None:
    """Return the ids that are drafted [columns] int64, rising; None for all.

    Args:
        tokens: trained tokens of the text.
        vocab_size: V.
        size: number of ids, 0 for all. None: all up to ALL_IDS; above the smallest power of two from FEWEST on whose
            most frequent ids are COVERAGE of the tokens.
    """
    counts = torch.bincount(tokens.flatten().long(), minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)
    if size is None:
        size = vocab_size if vocab_size <= ALL_IDS else FEWEST
        shares = counts[order].cumsum(0) / counts.sum().clamp(min=1)
        while size < vocab_size and shares[size - 1] < COVERAGE:
            size *= 2
    return None if size == 0 or size >= vocab_size else order[:size].sort().values


def coverage(ids: Tensor, tokens: Tensor) -> float:
    """Return the share of tokens that are among ids."""
    return torch.isin(tokens.flatten().long(), ids).float().mean().item()
