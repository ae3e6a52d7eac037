"""Drafts of structured requests that are not masked (`proposers/grammar.py`), on Model Runner V1.

They are the argmax and scored as such, a law of one point: where vLLM cuts them then depends on nothing that was drawn,
and the output keeps its law.
"""

from __future__ import annotations

import torch
from torch import Tensor


def as_point(probs: Tensor, rows: list[int], tokens: Tensor) -> None:
    """Make the laws `rows` of probs [B, V] points at tokens [B], in place."""
    if rows:
        probs[rows] = torch.nn.functional.one_hot(tokens[rows], probs.shape[1]).to(probs.dtype)
