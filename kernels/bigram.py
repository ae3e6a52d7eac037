"""A bigram: a low-rank term that the token before adds to the logits of a leaf, equal for all components.

leaf_k[z, v | x_(k-1)] = log_softmax_v(logits_k[z, v] + (source[x_(k-1)] target_k)[v])

With one component this is DSpark's Markov head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Bigram(NamedTuple):
    """The term of the positions from the second on; the hidden state already depends on the token before the first."""

    source: Tensor  # [V, R], by the token before
    target: Tensor  # [m, R, V], of positions 2 .. m + 1 of the window

    def bias(self, k: int, previous: Tensor) -> Tensor:
        """Return the term [B, V] float32 of previous [B] int64 for position 2 + k."""
        return full(self.source[previous]) @ full(self.target[k])

    def biases(self, tokens: Tensor) -> Tensor:
        """Return the terms [B, m, V] float32 after tokens [B, m] int64 of a window; after -1 they are arbitrary."""
        sources = full(self.source[tokens.clamp(min=0)])  # [B, m, R]
        return (sources.transpose(0, 1) @ full(self.target[: tokens.shape[1]])).transpose(0, 1)


def full(x: Tensor) -> Tensor:
    """Return half precisions as float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()
