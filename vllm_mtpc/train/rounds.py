"""Rounds: from the second one on, windows are drawn where serving starts steps of the head as trained so far.

Serving starts a step behind the last token that was accepted, so steps start where the head errs and pass over what it
drafts right; windows that start everywhere alike are not what it is served on. The steps of a run are split into
`rounds` equal parts. The first one takes windows everywhere. Entering a block of rows in a later one, the head as it is
by then reads every window of the block once, along the text:

    P(drafts 2..k accepted | the text) = prod min(1, q(x_j) / p(x_j))                            (eval/acceptance.py)

which gives, exactly and without serving, the probability that a server which writes this text starts a step at each
position; at the first position of a continuation it is 1. The windows of the block are shuffled, each is kept with that
probability, and so on until there are as many as the block has without rounds (`windows.drawn`).

Text that was served is such text: the responses that `vllm-mtpc doctor --record` keeps are data like others.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.nn.utils.rnn import pad_sequence

from vllm_mtpc.eval.acceptance import step_starts
from vllm_mtpc.progress import Bar
from vllm_mtpc.train.windows import Windows, WindowSource, window_tokens

if TYPE_CHECKING:
    from accelerate import Accelerator

SLOW_SECONDS = 5  # from so many on, reading a block's windows is shown


class Rounds:
    """The steps of a run, round by round."""

    def __init__(
        self, rounds: int, steps: int, source: WindowSource, accelerator: Accelerator, drafter: nn.Module
    ) -> None:
        self.rounds, self.steps, self.source, self.accelerator = rounds, steps, source, accelerator
        self.drafter = getattr(drafter, "module", drafter)  # of DDP, which has no part in passes without a gradient
        if rounds > 1:
            register_fsdp_forward_method(self.drafter, "survival")
        self.number = 1  # of the round at hand
        self.known: dict[str, Any] | None = None  # what a resumed run needs: round, rows [R], chances [R, S]

    def batches(self, step: int) -> Iterator[Windows]:
        """The steps from `step` on. Chances are of the head at the time that their first step is asked for."""
        for number in range(1, self.rounds + 1):
            end = self.steps * number // self.rounds
            if step < end:
                self.number, self.source.chances = number, self.chances if number > 1 else None
                yield from islice(self.source.batches(step), end - step)
                step = end

    @torch.no_grad()
    def chances(self, block: Tensor) -> Tensor:
        """P(a step starts) [R, S] float16 at every position of the rows of a block [R]; 0 where no window starts."""
        known = self.known
        if known is None or known["round"] != self.number or not torch.equal(known["rows"], block):
            self.known = known = {"round": self.number, "rows": block, "chances": self._computed(block)}
        return known["chances"]

    def _computed(self, block: Tensor) -> Tensor:
        """Row by row, each process its own rows, so that a row's chances do not depend on their number."""
        rank, world, rows = self.source.rank, self.source.world, self.source.source.rows
        found = torch.zeros(len(block), rows.tokens.shape[1])
        held = block[rank::world]
        hidden, document = self.source.states(held), rows.document[held]
        turns = range(-(-len(block) // world))  # as many in each process: with FSDP they put the weights together
        label, quiet = f"round {self.number}: where steps start", not self.accelerator.is_main_process
        for turn in Bar(turns, label, leave=False, unit="row", disable=quiet, delay=SLOW_SECONDS):
            own = slice(turn, turn + 1)
            start = self.source.starts[held[own]].nonzero()[:, 1]
            row = torch.zeros_like(start)
            tokens = window_tokens(rows, held[own][row], start, self.source.window)
            windows = Windows(tokens, row, start, hidden[own], document[own], (tokens >= 0).sum(0))
            alive = self.drafter.survival(windows)
            if len(start):
                found[rank + turn * world, start] = start_chances(alive.cpu().double(), start).float()
        whole = self.accelerator.reduce(found.to(self.accelerator.device), "sum").cpu()
        return whole.half()


def start_chances(alive: Tensor, start: Tensor) -> Tensor:
    """P(a step starts) [B] at the windows of a row, ascending start[B]; each stretch of neighbours is a continuation.

    alive: [B, K], P(the first k drafts of a step that started there are accepted).
    """
    ends = (start.diff() != 1).nonzero()[:, 0] + 1
    pieces = alive.tensor_split(ends)
    chances = step_starts(pad_sequence(list(pieces), True))  # [continuations, longest]
    return torch.cat([row[: len(piece)] for row, piece in zip(chances, pieces, strict=True)])
