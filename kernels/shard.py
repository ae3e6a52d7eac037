"""A rank's part of a vocabulary divided over a tensor-parallel group, and the exchanges between ranks.

All-gathers copy bits, so all ranks draft the same tokens. Small leaves are gathered whole (`join`), and large ones for
small batches (`draft_memory.gathered_rows`). Otherwise the ranks exchange a number per component for each normaliser
and drafted token, and the conditionals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Shard(NamedTuple):
    """The part of one rank."""

    rank: int
    size: int  # of the group
    vocab_size: int  # V
    gather: Callable[[Tensor], Tensor]  # [B, X] of every rank -> [size * B, X], in order of rank
    padded: int | None = None  # divided rows, a multiple of size, if more than vocab_size

    @property
    def rows(self) -> int:
        """Rows of every rank; the last ranks' rows may exceed the vocabulary."""
        return -(-(self.padded or self.vocab_size) // self.size)

    @property
    def start(self) -> int:
        """First token of this rank."""
        return min(self.rank * self.rows, self.vocab_size)

    @property
    def stop(self) -> int:
        """Token after the last of this rank."""
        return min(self.start + self.rows, self.vocab_size)

    def join(self, terms: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return evidence [B, r] and logits [B, K, r, V] from `leaf.terms_of` and logits [B, K, r, rows]."""
        batch, num_drafts, r, _ = logits.shape
        own = F.pad(logits, (0, self.rows - logits.shape[3])).flatten(1)
        numbers = terms.contiguous().flatten(1).view(logits.dtype)  # as bits: not rounded
        parts, width = self.gathered(torch.cat([numbers, own], dim=1)), numbers.shape[1]
        norms, picked = parts[..., :width].contiguous().view(torch.float32).view(self.size, batch, 2, r).unbind(2)
        whole = parts[..., width:].unflatten(2, (num_drafts, r, self.rows)).permute(1, 2, 3, 0, 4).flatten(3)
        return picked.amax(dim=0) - norms.logsumexp(dim=0), whole[..., : self.vocab_size]

    def evidence(self, terms: Tensor) -> Tensor:
        """Return the evidence [B, r] of x_1 from this rank's `leaf.terms_of` [B, 2, r]."""
        norms, picked = self.gathered(terms).unbind(2)
        return picked.amax(dim=0) - norms.logsumexp(dim=0)

    def normalisers(self, own: Tensor) -> Tensor:
        """Return log-sums [B, ...] float32 over the vocabulary from those over this rank's rows."""
        return self.gathered(own).logsumexp(dim=0)

    def whole(self, own: Tensor) -> Tensor:
        """Return [B, V] from this rank's columns [B, rows]."""
        return self.gathered(own).transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def columns(self, whole: Tensor) -> Tensor:
        """Return this rank's columns [B, rows] of [B, V]; 0 beyond the vocabulary."""
        return F.pad(whole[:, self.start : self.stop], (0, self.rows - (self.stop - self.start)))

    def at(self, own: Tensor, token: Tensor) -> Tensor:
        """Return the column token [B] of logits, [B, r], from this rank's own [B, r, rows]."""
        local = token - self.start
        index = local.clamp(0, self.rows - 1)[:, None, None].expand(-1, own.shape[1], 1)
        is_elsewhere = (local < 0) | (local >= self.rows)
        return self.gathered(own.gather(2, index)[..., 0].masked_fill(is_elsewhere[:, None], -torch.inf)).amax(dim=0)

    def gathered(self, own: Tensor) -> Tensor:
        """Return [size, B, ...] from own [B, ...] of every rank."""
        return self.gather(own.flatten(1)).view(self.size, *own.shape)
