"""What is watched while a head drafts: how long a pass takes and, on request, that all ranks draft the same.

The clock makes nothing wait. On a CPU a pass is over when its call returns; on a GPU two events enclose it on its
stream, and a later step reads those the device has passed.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed import get_tp_group

from vllm_mtpc.proposers.seam.watch import COST, DEBUG, IDLE, is_debug


@dataclass
class Cuts:
    """Drafts that a head had room for and that were not verified: fewer were asked for (by the plan or the schedule),
    they were unlikely to survive, or a step had no room left for them (token budget, length, a grammar)."""

    schedule: int = 0
    survival: int = 0
    budget: int = 0


class DraftClock:
    """Seconds of draft passes that nobody has taken yet, how many passes that were, and what was cut."""

    def __init__(self, is_cuda: bool = False) -> None:
        self.is_cuda, self.cuts = is_cuda, Cuts()
        self.seconds, self.passes = 0.0, 0
        self.running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def timed(self) -> Iterator[None]:
        if self.is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self.running.append((start, end))
            return
        started = time.perf_counter()
        yield
        self.add(time.perf_counter() - started)

    def take(self) -> dict[str, float]:
        """Fields of DraftFigures since the last call; seconds of passes that the device is known to have finished."""
        while self.running and self.running[0][1].query():
            start, end = self.running.popleft()
            self.add(start.elapsed_time(end) / 1000)
        cuts = self.cuts
        taken = {"draft_seconds": self.seconds, "draft_passes": self.passes}
        taken |= {"cut_by_schedule": cuts.schedule, "cut_by_survival": cuts.survival, "cut_by_budget": cuts.budget}
        self.seconds, self.passes = 0.0, 0
        cuts.schedule = cuts.survival = cuts.budget = 0
        return taken

    def add(self, seconds: float) -> None:
        """A pass that took so long."""
        self.seconds += seconds
        self.passes += 1


def watch_speculator(speculator: Any) -> None:
    """Watch the drafts of a speculator of Model Runner V2, as `speculator.clock`."""
    most, clock, is_checked = speculator.num_speculative_steps, DraftClock(speculator.device.type == "cuda"), is_debug()
    propose, speculator.clock = speculator.propose, clock

    def watched(
        input_batch: Any, *args: Any, dummy_run: bool = False, num_speculative_tokens: int | None = None, **kwargs: Any
    ) -> Any:
        count = most if num_speculative_tokens is None else num_speculative_tokens
        given = {"dummy_run": dummy_run, "num_speculative_tokens": num_speculative_tokens, **kwargs}
        if dummy_run:
            return propose(input_batch, *args, **given)
        clock.cuts.schedule += (most - count) * input_batch.num_reqs
        if count == 0:
            return propose(input_batch, *args, **given)
        with clock.timed():
            drafts = propose(input_batch, *args, **given)
        if is_checked:
            check_ranks(drafts[:, :count].tolist())
        return drafts

    speculator.propose = watched


def with_cost(output: Any, drafter: Any, is_idle: bool) -> Any:
    """The output of a step, of either runner, which takes along what its drafts have cost, or that nothing drafts."""
    made = getattr(output, "model_runner_output", output)  # in the place of which vLLM may have one that is to come
    if getattr(made, "req_ids", None):
        if is_idle:
            setattr(made, IDLE, True)
        elif hasattr(drafter, "clock"):
            setattr(made, COST, drafter.clock.take())
    return output


def check_ranks(drafts: list[list[int]]) -> None:
    """Raise RuntimeError on every rank unless all tensor-parallel ranks have drafted the same."""
    group = get_tp_group()
    if group.world_size == 1:
        return
    own = torch.tensor([zlib.crc32(repr(drafts).encode())])
    sums = [torch.empty_like(own) for _ in range(group.world_size)]
    torch.distributed.all_gather(sums, own, group=group.cpu_group)
    found = [f"{int(one):08x}" for one in sums]
    if len(set(found)) > 1:
        raise RuntimeError(
            f"{DEBUG}: the tensor-parallel ranks have drafted different tokens (checksums by rank: {', '.join(found)}; "
            f"rank {group.rank_in_group} drafted {drafts}); the verifier would read different texts"
        )
