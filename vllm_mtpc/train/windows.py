"""Windows of packed rows, in the order they are trained on.

A window starts at (row, t): h = hidden[row, t] parameterises the circuit over x_k = tokens[row, t + k], k = 1 .. n.
Training starts windows where serving does: x_1 must be a token of the loss (assistant turns, responses), in the same
document. From the first x_k on that is not, positions are -1: they are marginalised and carry no loss.

The order depends on the seed alone, not on the number of processes: rows are shuffled by epoch and cut into blocks;
the windows of a block are shuffled and cut into steps. A process computes the hidden states of its own rows only
(every world-th row of a block) and takes the windows of a step that lie in them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.data.rows import Rows, eligible
from vllm_mtpc.errors import MtpcError

if TYPE_CHECKING:
    from vllm_mtpc.train.cache import HiddenSource


class Windows(NamedTuple):
    """The windows of one step that this process trains on."""

    tokens: Tensor  # [B, n] int64, x_1 .. x_n; -1: marginalised, no loss
    row: Tensor  # [B] int64, row within `hidden`
    start: Tensor  # [B] int64, t
    hidden: Tensor  # [R, S, D], this process's rows of the block
    document: Tensor  # [R, S] int32, of those rows
    counts: Tensor  # [n] int64, windows of the whole step, over all processes, with a token at k
    draws: Tensor | None = None  # [B, ...] float32, random numbers of each window, where the head asks for some

    def each(self, change: Callable[[Tensor], Tensor]) -> Windows:
        """The same step with what is of each window changed: moved, or only some of them taken."""
        own = {name: getattr(self, name) for name in ("tokens", "row", "start", "draws")}
        return self._replace(**{name: change(value) for name, value in own.items() if value is not None})


def window_tokens(rows: Rows, row: Tensor, start: Tensor, window: int) -> Tensor:
    """x_1 .. x_n [B, n] int64 of windows at (row, start); -1 from the first position on that is not trained."""
    length = rows.tokens.shape[1]
    at = start[:, None] + torch.arange(1, window + 1)  # [B, n]
    inside, at = at < length, at.clamp(max=length - 1)
    same = rows.document[row[:, None], at] == rows.document[row, start][:, None]
    kept = (inside & same & rows.trained[row[:, None], at]).long().cumprod(1).bool()
    return torch.where(kept, rows.tokens[row[:, None], at].long(), -1)


def window_states(hidden: Tensor, row: Tensor, start: Tensor, window: int) -> Tensor:
    """The target's states [B, n, D] that predict x_1 .. x_n; beyond the row, the last one (those are masked)."""
    at = (start[:, None] + torch.arange(window, device=start.device)).clamp(max=hidden.shape[1] - 1)
    return hidden[row[:, None], at]


class WindowSource:
    """The steps of a run; `world` processes share each, this one is `rank`."""

    def __init__(
        self,
        source: HiddenSource,
        window: int,
        windows_per_step: int,
        block_rows: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        draw: Callable[[int, int], Tensor] | None = None,
    ) -> None:
        self.draw = draw  # (seed, windows of the step) -> their random numbers
        self.source, self.window, self.windows_per_step, self.seed = source, window, windows_per_step, seed
        self.rank, self.world = rank, world
        self.starts = eligible(source.rows)  # [N, S]
        self.per_row = self.starts.sum(1)  # [N]
        if not int(self.per_row.sum()):
            raise MtpcError("no window can start anywhere in the data: give documents of two tokens or more")
        self.block_rows, self.steps_read = block_rows, 0  # steps whose hidden states were read so far
        self._held: tuple[Tensor, Tensor] | None = None  # rows of the block at hand, and their hidden states

    def blocks(self, epoch: int) -> list[Tensor]:
        """Rows of each block of an epoch, sorted within a block."""
        rows = self.per_row.nonzero()[:, 0]
        order = rows[torch.randperm(len(rows), generator=self._generator(epoch, 0))]
        return [block.sort().values for block in order.split(self.block_rows)]

    def steps_of(self, block: Tensor) -> int:
        """Full steps in a block; a block too small for one still makes one."""
        return max(1, int(self.per_row[block].sum()) // self.windows_per_step)

    def steps_per_epoch(self) -> int:
        return sum(self.steps_of(block) for block in self.blocks(0))

    def batches(self, first_step: int = 0) -> Iterator[Windows]:
        """Steps without end, from step `first_step` on; earlier ones cost no hidden state."""
        epoch = 0
        while True:
            for number, block in enumerate(self.blocks(epoch)):
                steps = self.steps_of(block)
                if first_step >= steps:
                    first_step -= steps
                    continue
                yield from self._block_batches(block, (epoch, number + 1), range(first_step, steps))
                first_step = 0
            epoch += 1

    def _block_batches(self, block: Tensor, place: tuple[int, int], steps: range) -> Iterator[Windows]:
        """place: the epoch, and the number of the block in it from 1 on."""
        row, start = self.starts[block].nonzero(as_tuple=True)  # [windows of the block] each
        order = torch.randperm(len(row), generator=self._generator(*place))
        held = block[self.rank :: self.world]
        hidden, document = self.states(held), self.source.rows.document[held]
        self.steps_read += len(steps)
        for step in steps:
            chosen = order[step * self.windows_per_step : (step + 1) * self.windows_per_step]
            tokens = window_tokens(self.source.rows, block[row[chosen]], start[chosen], self.window)
            own = row[chosen] % self.world == self.rank
            draws = None
            if self.draw is not None:  # for the whole step, whatever the number of processes
                draws = self.draw(self._seed(*place, step), len(chosen))[own]
            mine = row[chosen][own] // self.world, start[chosen][own]
            yield Windows(tokens[own], *mine, hidden, document, (tokens >= 0).sum(0), draws)

    def states(self, rows: Tensor) -> Tensor:
        """Hidden states of rows; kept while the same rows are asked for, so data of one block is read once."""
        if self._held is None or not torch.equal(self._held[0], rows):
            self._held = None  # two blocks never exist at once
            self._held = rows, self.source.hidden(rows)
        return self._held[1]

    def _generator(self, epoch: int, block: int) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed(epoch, block))

    def _seed(self, *place: int) -> int:
        text = "/".join(map(str, (self.seed, *place)))  # sums of them would collide
        return random.Random(text).getrandbits(63)
