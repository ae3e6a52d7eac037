"""Part of a vocabulary: what one rank of a tensor-parallel group has of logits, and what ranks exchange of them.

What is exchanged are bits, so every rank goes on with the same numbers and drafts the same tokens. Small leaves cross
whole, in one all-gather with the two numbers per component that x_1 needs (`join`). Large ones stay where they are: the
ranks exchange a number per component for each normaliser and each drafted token, and the conditionals, an r-th of the
logits (`evidence`, `normalisers`, `whole`, `at`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Shard(NamedTuple):
    """The part of one rank. `gather`: [B, X] of every rank -> [size * B, X], bit by bit and in order of rank.

    padded: rows that are divided, a multiple of size, where that is more than vocab_size.
    """

    rank: int
    size: int
    vocab_size: int
    gather: Callable[[Tensor], Tensor]
    padded: int | None = None

    @property
    def rows(self) -> int:
        """Rows of every rank; of the last ones some may lie beyond the vocabulary."""
        return -(-(self.padded or self.vocab_size) // self.size)

    @property
    def start(self) -> int:
        """The token of this rank's first row."""
        return min(self.rank * self.rows, self.vocab_size)

    @property
    def stop(self) -> int:
        return min(self.start + self.rows, self.vocab_size)

    def join(self, terms: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """`Head.draft_leaves` of the whole vocabulary from this rank's `leaf.terms` and logits [B, K, r, rows]."""
        batch, num_drafts, r, _ = logits.shape
        own = F.pad(logits, (0, self.rows - logits.shape[3])).flatten(1)
        numbers = terms.contiguous().flatten(1).view(logits.dtype)  # their bits: not rounded on the way
        parts = self.gather(torch.cat([numbers, own], dim=1)).view(self.size, batch, -1)
        width = numbers.shape[1]
        norms, picked = parts[..., :width].contiguous().view(torch.float32).view(self.size, batch, 2, r).unbind(2)
        whole = parts[..., width:].unflatten(2, (num_drafts, r, self.rows)).permute(1, 2, 3, 0, 4)
        return picked.amax(dim=0) - norms.logsumexp(dim=0), whole.reshape(batch, num_drafts, r, -1)[
            ..., : self.vocab_size
        ]

    def evidence(self, terms: Tensor) -> Tensor:
        """Evidence [B, r] of x_1 from this rank's `leaf.terms` [B, 2, r]."""
        norms, picked = self.gathered(terms).unbind(2)
        return picked.amax(dim=0) - norms.logsumexp(dim=0)

    def normalisers(self, own: Tensor) -> Tensor:
        """Logarithms of sums over the vocabulary from those over this rank's rows, [B, ...] float32."""
        return self.gathered(own).logsumexp(dim=0)

    def whole(self, own: Tensor) -> Tensor:
        """[B, V] from this rank's columns [B, rows]."""
        return self.gathered(own).transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def columns(self, whole: Tensor) -> Tensor:
        """This rank's columns [B, rows] of [B, V], 0 beyond the vocabulary."""
        return F.pad(whole[:, self.start : self.stop], (0, self.rows - (self.stop - self.start)))

    def at(self, own: Tensor, token: Tensor) -> Tensor:
        """[B, r]: the column token[B] of [B, r, V], of which this rank has own[B, r, rows]."""
        local = token - self.start
        index = local.clamp(0, self.rows - 1)[:, None, None].expand(-1, own.shape[1], 1)
        is_elsewhere = (local < 0) | (local >= self.rows)
        return self.gathered(own.gather(2, index)[..., 0].masked_fill(is_elsewhere[:, None], -torch.inf)).amax(dim=0)

    def gathered(self, own: Tensor) -> Tensor:
        """[size, B, ...] of own[B, ...] of every rank."""
        return self.gather(own.flatten(1)).view(self.size, *own.shape)
