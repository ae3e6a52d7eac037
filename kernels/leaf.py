"""Logits of leaves that are made of parts, and the evidence of x_1, which the target has sampled.

leaf_k[z, v] = base_k[v] + (low_k[z] out_k)[v]                                         components of low rank
leaf_k[z, v | x_(k-1)] = log_softmax_v(logits_k[z, v] + (source[x_(k-1)] target_k)[v])  a bigram

The parts of a vocabulary that is divided over ranks add up in two numbers (`terms_of`): log-normalisers by log-sum-exp,
the token's logit by maximum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LowRank(NamedTuple):
    """Components at k positions as low-rank differences from logits that they have in common."""

    low: Tensor  # [B, k, r, C]; the last two dimensions are contiguous
    out: Tensor  # [k, C, V]

    def leaves(self, base: Tensor) -> Tensor:
        """Return the logits [B, k, r, V] for base [B, k, 1, V], in its dtype."""
        batch, positions, r, _ = self.low.shape
        low = self.low.transpose(0, 1).flatten(1, 2)  # one product per position
        terms = torch.bmm(low, self.out).view(positions, batch, r, -1).transpose(0, 1)
        return terms.to(base.dtype).add_(base)  # in place: both are large

    def positions(self, first: int, stop: int | None = None) -> LowRank:
        """Return those of the positions first .. stop - 1."""
        return LowRank(self.low[:, first:stop], self.out[first:stop])


class Bigram(NamedTuple):
    """A low-rank term of the token before, equal for all components; with one component DSpark's Markov head.

    It is that of the positions from the second on: the hidden state already depends on the token before the first.
    """

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


def evidence_of(logits: Tensor, token: Tensor) -> Tensor:
    """Return log p(token | z) [B, r] float32 of logits [B, r, V] and token [B] int64 in 0 .. V - 1."""
    log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
    return log_probs.gather(2, token[:, None, None].expand(-1, logits.shape[1], 1))[..., 0]


def terms_of(logits: Tensor, token: Tensor) -> Tensor:
    """Return the log-normaliser and the token's logit, [B, 2, r] float32, of logits [B, r, V] and token [B] int64."""
    if not logits.shape[-1]:  # a rank without tokens
        return logits.new_full((len(logits), 2, logits.shape[1]), -torch.inf, dtype=torch.float32)
    logits, vocab_size = logits.float(), logits.shape[-1]
    index = token.clamp(0, vocab_size - 1)[:, None, None].expand(-1, logits.shape[1], 1)
    is_outside = (token < 0) | (token >= vocab_size)
    picked = logits.gather(2, index)[..., 0].masked_fill(is_outside[:, None], -torch.inf)
    return torch.stack([logits.logsumexp(dim=-1), picked], dim=1)
