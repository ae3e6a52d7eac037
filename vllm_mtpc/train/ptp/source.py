"""What windows of a PTP head are cut from: the target's pass over packed rows, and its interval of every token.

The target is frozen, so a block of rows is run once and held while steps draw windows from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_mtpc.data.rows import Rows
from vllm_mtpc.heads.ptp.distribution import edges, processed
from vllm_mtpc.heads.ptp.student import Prefix, Student
from vllm_mtpc.train.options import TrainOptions

BLOCK_BYTES = 1 << 30
LAW_BYTES = 1 << 28  # of a distribution over the vocabulary that exists at once


class Block(NamedTuple):
    """Packed rows as the target has read them."""

    prefix: Prefix
    left: Tensor  # [R, S - 1] float64, where the interval of token t + 1 begins under the target's distribution at t
    right: Tensor  # [R, S - 1] float64, where it ends


class PrefixSource:
    """Blocks of rows, computed when they are asked for."""

    def __init__(self, student: Student, rows: Rows, options: TrainOptions, batch_rows: int = 8) -> None:
        self.student, self.rows, self.options, self.batch_rows = student, rows, options, batch_rows

    def hidden(self, row_indices: Tensor) -> Block:
        """The block of rows[row_indices]."""
        tokens, documents = self.rows.tokens[row_indices], self.rows.document[row_indices]
        parts = zip(tokens.split(self.batch_rows), documents.split(self.batch_rows), strict=True)
        return _joined([self._batch(*part) for part in parts])

    @torch.no_grad()
    def _batch(self, tokens: Tensor, documents: Tensor) -> Block:
        prefix = self.student.prefix(tokens, documents)
        following, states = tokens[:, 1:].to(prefix.hidden.device), prefix.hidden[:, :-1]
        places = max(1, LAW_BYTES // (16 * self.student.target.vocab_size))
        found = [
            edges(law_of(self.student, some, self.options), token)
            for some, token in zip(states.flatten(0, 1).split(places), following.flatten().split(places), strict=True)
        ]
        left, right = (torch.cat(parts).view(following.shape) for parts in zip(*found, strict=True))
        return Block(prefix, left, right)


def law_of(student: Student, hidden: Tensor, options: TrainOptions) -> Tensor:
    """log Q [..., V] float32, the target's processed distribution at its states hidden[..., D]."""
    return processed(student.logits(hidden), options.temperature, options.top_k, options.top_p)


def default_block_rows(student: Student, seq_len: int) -> int:
    """Rows whose states, keys and values take 1 GiB."""
    row = student.prefix(torch.zeros(1, 2, dtype=torch.long))
    numbers = sum(part[0, ..., :1, :].numel() for part in (row.hidden, *row.keys, *row.values))
    return max(1, BLOCK_BYTES // (seq_len * numbers * student.target.dtype.itemsize))


def drawing(window: int, beta: float) -> Callable[[int, int], Tensor]:
    """The random numbers of windows: [B, 2, n], places Beta(b, b) in an interval, and uniform ones; all in [0, 1)."""

    def draw(seed: int, count: int) -> Tensor:
        generator = np.random.default_rng(seed)
        numbers = np.stack([generator.beta(beta, beta, (count, window)), generator.random((count, window))], 1)
        return torch.from_numpy(numbers.astype(np.float32)).clamp(max=1 - 2**-24)

    return draw


def _joined(blocks: list[Block]) -> Block:
    hidden, keys, values, positions, documents = zip(*(block.prefix for block in blocks), strict=True)
    by_layer = [[torch.cat(parts) for parts in zip(*some, strict=True)] for some in (keys, values)]
    prefix = Prefix(torch.cat(hidden), *by_layer, torch.cat(positions), torch.cat(documents))
    return Block(prefix, torch.cat([block.left for block in blocks]), torch.cat([block.right for block in blocks]))
