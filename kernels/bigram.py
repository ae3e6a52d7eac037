"""What the token before adds to the logits of a leaf: the same for every component, of low rank.

leaf_k[z, v | x_(k-1)] = log_softmax_v(logits_k[z, v] + (source[x_(k-1)] target_k)[v])

Evidence along given tokens is still one number per component, so whatever is a filter over them stays one. Alone, with
one component, this is DSpark's Markov head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Bigram(NamedTuple):
    """Of the positions from the second on: the first has no token before it that the hidden state does not know."""

    source: Tensor  # [V, R], by the token before
    target: Tensor  # [m, R, V], of positions 2 .. m + 1 of the window

    def bias(self, k: int, previous: Tensor) -> Tensor:
        """What previous[B] int64 adds to the logits of position 2 + k: [B, V] float32."""
        return _full(self.source[previous]) @ _full(self.target[k])

    def biases(self, tokens: Tensor) -> Tensor:
        """What tokens[B, m], the first ones of a window, add to the logits of positions 2 .. m + 1: [B, m, V] float32.

        A token of -1 adds something: what follows it must be of no consequence.
        """
        sources = _full(self.source[tokens.clamp(min=0)])  # [B, m, R]
        return (sources.transpose(0, 1) @ _full(self.target[: tokens.shape[1]])).transpose(0, 1)


def _full(x: Tensor) -> Tensor:
    """Half precisions as float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()
