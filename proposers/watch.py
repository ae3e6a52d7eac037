"""What is watched while a head drafts: how long a pass takes and, on request, that all ranks draft the same.

The clock makes nothing wait. On a CPU a pass is over when its call returns; on a GPU two events enclose it on its
stream, and a later step reads those the device has passed.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed import get_tp_group

from vllm_mtpc.proposers.seam.watch import DEBUG, is_debug


class DraftClock:
    """Seconds of draft passes that nobody has taken yet, and how many passes that were."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
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
        self._add(time.perf_counter() - started)

    def take(self) -> tuple[float, int]:
        """Seconds and passes since the last call, of passes that the device is known to have finished."""
        while self.running and self.running[0][1].query():
            start, end = self.running.popleft()
            self._add(start.elapsed_time(end) / 1000)
        taken = self.seconds, self.passes
        self.seconds, self.passes = 0.0, 0
        return taken

    def _add(self, seconds: float) -> None:
        self.seconds += seconds
        self.passes += 1


def watch_proposer(proposer: Any, device: torch.device) -> None:
    """Watch V1's drafts, as `proposer.clock`."""

    def num_drafts(runner: Any, tokens: Any, metadata: Any, hidden: Any, spec_metadata: Any, num_scheduled: int) -> int:
        return proposer.num_drafts if metadata.generators else num_scheduled

    proposer.clock = DraftClock(device)
    proposer.propose_drafts = _watched(proposer.propose_drafts, proposer.clock, num_drafts)


def watch_speculator(speculator: Any) -> None:
    """Watch the drafts of a speculator of Model Runner V2, as `speculator.clock`."""

    def num_drafts(
        *args: Any, dummy_run: bool = False, num_speculative_tokens: int | None = None, **kwargs: Any
    ) -> int:
        if dummy_run:
            return 0
        return speculator.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens

    speculator.clock = DraftClock(speculator.device)
    speculator.propose = _watched(speculator.propose, speculator.clock, num_drafts)


def _watched(propose: Callable[..., Any], clock: DraftClock, num_drafts: Callable[..., int]) -> Callable[..., Any]:
    """`propose`, its passes timed; num_drafts(*args, **kwargs): drafts of a call per request, 0: no draft pass."""
    is_checked = is_debug()

    def watched(*args: Any, **kwargs: Any) -> Any:
        count = num_drafts(*args, **kwargs)
        if count == 0:
            return propose(*args, **kwargs)
        with clock.timed():
            drafts = propose(*args, **kwargs)
        if is_checked:
            check_ranks(drafts[:, :count].tolist() if isinstance(drafts, torch.Tensor) else drafts)
        return drafts

    return watched


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
