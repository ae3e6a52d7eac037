"""Windows of packed rows, in the order of training.

A window starts at (row, t): h = hidden[row, t] parameterises the circuit over x_k = tokens[row, t + k], k = 1 .. n. As
when serving, x_1 is a trained token of the same document. From the first x_k on that is not, positions are -1: they are
marginalised and have no loss.

The order depends on the seed only, not on the number of processes: rows are shuffled by epoch and split into blocks;
the windows of a block are shuffled and split into steps. A process computes the hidden states of its rows (every
world-th row of a block) and takes the windows of a step that start in them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.data.rows import Rows, eligible
from vllm_mtpc.train.cache import HiddenSource


class Windows(NamedTuple):
    """The windows of one step in this process."""

    tokens: Tensor  # [B, n] int64, x_1 .. x_n; -1: marginalised, no loss
    row: Tensor  # [B] int64, row of `hidden`
    start: Tensor  # [B] int64, t
    hidden: Any  # [R, S, D], states of this process's rows of the block, or a `Block`
    document: Tensor  # [R, S] int32, documents of these rows
    counts: Tensor  # [n] int64, windows of the whole step, over all processes, with a token at k
    draws: Any = None  # [B, ...] float32, random numbers of each window; None without `draw`

    def each(self, change: Callable[[Tensor], Tensor]) -> Windows:
        """Apply a function (a move, an index) to every tensor that has one entry per window."""
        parts = {name: getattr(self, name) for name in ("tokens", "row", "start", "draws")}
        return self._replace(**{name: change(value) for name, value in parts.items() if value is not None})


def window_tokens(rows: Rows, row: Tensor, start: Tensor, window: int) -> Tensor:
    """Return x_1 .. x_n, [B, n] int64, of windows at (row, start); -1 from the first untrained position on."""
    length = rows.tokens.shape[1]
    at = start[:, None] + torch.arange(1, window + 1)  # [B, n]
    inside, at = at < length, at.clamp(max=length - 1)
    same = rows.document[row[:, None], at] == rows.document[row, start][:, None]
    kept = (inside & same & rows.trained[row[:, None], at]).long().cumprod(1).bool()
    return torch.where(kept, rows.tokens[row[:, None], at].long(), -1)


def window_states(hidden: Tensor, row: Tensor, start: Tensor, window: int) -> Tensor:
    """Return the target's states, [B, n, D], that predict x_1 .. x_n; past the row's end its last one (masked)."""
    at = (start[:, None] + torch.arange(window, device=start.device)).clamp(max=hidden.shape[1] - 1)
    return hidden[row[:, None], at]


@dataclass
class WindowSource:
    """The steps of a run, shared by `world` processes, of which this one is `rank`."""

    source: HiddenSource  # rows and their hidden states
    window: int  # n, tokens of a window
    windows_per_step: int  # of all processes
    block_rows: int  # rows whose windows are shuffled together
    seed: int  # of the order
    rank: int = 0
    world: int = 1
    draw: Callable[[int, int], Tensor] | None = None  # (seed, windows of a step) -> random numbers, [windows, ...]
    ahead: int = 0  # steps of the run; before them a thread computes the next block while the steps of one are taken

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._next: tuple[Tensor, Future[Any]] | None = None  # rows of the next block, and their hidden states
        self.starts = eligible(self.source.rows)  # [N, S]
        self.per_row = self.starts.sum(1)  # [N]
        self._held: tuple[Tensor, Tensor] | None = None  # rows of the current block, and their hidden states

    def blocks(self, epoch: int) -> list[Tensor]:
        """Return the rows of each block of an epoch, sorted within a block."""
        rows = self.per_row.nonzero()[:, 0]
        order = rows[torch.randperm(len(rows), generator=self._generator(epoch, 0))]
        return [block.sort().values for block in order.split(self.block_rows)]

    def steps_of(self, block: Tensor) -> int:
        """Return the full steps in a block, 1 or more."""
        return max(1, int(self.per_row[block].sum()) // self.windows_per_step)

    def steps_per_epoch(self) -> int:
        return sum(self.steps_of(block) for block in self.blocks(0))

    def batches(self, first_step: int = 0) -> Iterator[Windows]:
        """Yield the steps of all epochs, without end; the steps before `first_step` compute no hidden states."""
        end = 0
        for epoch in count():
            blocks = self.blocks(epoch)
            for number, block in enumerate(blocks, 1):
                begin, end = end, end + self.steps_of(block)
                if first_step >= end:
                    continue
                self.states(block[self.rank :: self.world])
                if end < self.ahead:
                    following = blocks[number] if number < len(blocks) else self.blocks(epoch + 1)[0]
                    rows = following[self.rank :: self.world]
                    self._next = rows, self._pool.submit(self.source.hidden, rows)
                yield from self._block_batches(block, (epoch, number), range(max(0, first_step - begin), end - begin))

    def _block_batches(self, block: Tensor, place: tuple[int, int], steps: range) -> Iterator[Windows]:
        """Yield steps of a block; place: its epoch and its number in it, from 1."""
        row, start = self.starts[block].nonzero(as_tuple=True)  # [windows of the block] each
        order = torch.randperm(len(row), generator=self._generator(*place))
        held = block[self.rank :: self.world]
        hidden, document = self.states(held), self.source.rows.document[held]
        for step in steps:
            chosen = order[step * self.windows_per_step : (step + 1) * self.windows_per_step]
            tokens = window_tokens(self.source.rows, block[row[chosen]], start[chosen], self.window)
            is_here = row[chosen] % self.world == self.rank
            draws = self.draw and self.draw(self._seed(*place, step), len(chosen))[is_here]  # drawn for the whole step
            starts = row[chosen][is_here] // self.world, start[chosen][is_here]
            yield Windows(tokens[is_here], *starts, hidden, document, (tokens >= 0).sum(0), draws)

    def states(self, rows: Tensor) -> Tensor:
        """Return the hidden states of rows; kept until other rows are asked for."""
        if self._held is None or not torch.equal(self._held[0], rows):
            self._held = None  # free the last block first
            coming = self._next
            is_coming = coming is not None and torch.equal(coming[0], rows)
            self._held = rows, coming[1].result() if coming and is_coming else self.source.hidden(rows)
        return self._held[1]

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _generator(self, epoch: int, block: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed(epoch, block))

    def _seed(self, *place: int) -> int:
        return random.Random("/".join(map(str, (self.seed, *place)))).getrandbits(63)  # sums would collide
