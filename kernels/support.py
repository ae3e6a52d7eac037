"""Part of a vocabulary that drafts are picked from: the tokens that a head holds most probable, by request and draft.

A leaf within a support is the leaf over the vocabulary, truncated and renormalised: its logits elsewhere are -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Support(NamedTuple):
    """tokens [B, K, M] int64, different ones at each draft; of a vocabulary of vocab_size."""

    tokens: Tensor
    vocab_size: int

    def spread(self, own: Tensor, k: int) -> Tensor:
        """[B, V] from own[B, M] at draft k; -inf elsewhere."""
        return own.new_full((len(own), self.vocab_size), -torch.inf).scatter_(1, self.tokens[:, k], own)

    def at(self, own: Tensor, token: Tensor, k: int) -> Tensor:
        """own[B, r, M] at token[B] of draft k, [B, r]; 0 where the token is elsewhere, which marginalises it.

        A grammar may leave nothing of a support: the draft is then from elsewhere, and tells nothing of what follows.
        """
        is_it = self.tokens[:, k] == token[:, None]  # [B, M]
        picked = own.gather(2, is_it.int().argmax(1)[:, None, None].expand(-1, own.shape[1], 1))[..., 0]
        return picked.masked_fill(~is_it.any(1, keepdim=True), 0.0)
