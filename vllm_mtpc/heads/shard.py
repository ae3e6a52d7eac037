"""Unembeddings divided over the ranks of a tensor-parallel group, by rows of the vocabulary.

Each rank multiplies with its own rows; one all-gather of the logits, with the two numbers per component that x_1 needs,
gives every rank the same bits, and so the same drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Unembeddings of this many bytes and more are divided over the ranks: reading them must cost more than that the ranks
# meet. CPU: 22 GB/s against 0.24 ms to gather one request's logits of the demo and 0.6 ms for 16 (gloo, two ranks).
# GPU, not measured: 64 MiB are 20 us at 3.3 TB/s, which is what a small all-gather takes. What is gathered is B / D
# of what is read, so the batch hardly matters there.
SHARD_BYTES = {"cpu": 16 << 20}
SHARD_BYTES_GPU = 64 << 20


def pays(num_bytes: int, num_ranks: int, device_type: str) -> bool:
    """Whether unembeddings of num_bytes are divided."""
    return num_ranks > 1 and num_bytes >= SHARD_BYTES.get(device_type, SHARD_BYTES_GPU)


class Shard(NamedTuple):
    """The part of one rank. `gather`: [B, X] of every rank -> [size * B, X], bit by bit and in order of rank."""

    rank: int
    size: int
    vocab_size: int
    gather: Callable[[Tensor], Tensor]

    @property
    def rows(self) -> int:
        """Rows of every rank but the last, which may have fewer."""
        return -(-self.vocab_size // self.size)

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
