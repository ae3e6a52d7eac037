"""Time a call: warm-up, repetitions, median and quartiles; the bandwidth of a device's memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

WARM_UP = 5
EVICT = 256 << 20  # bytes written between calls on a GPU, so that weights are read from memory as in a step
COPIED = {"cpu": 256 << 20, "cuda": 2 << 30}  # bytes, more than any cache


class Time(NamedTuple):
    """Milliseconds of a call; a list in a result file."""

    median: float
    lower: float  # quartiles
    upper: float


def measure(call: Callable[[], Any], device: torch.device, repeats: int) -> Time:
    """Time `call` on `device`: the host's clock on a CPU, events on a GPU with its caches overwritten in between."""
    values = _on_gpu(call, repeats) if device.type == "cuda" else _on_cpu(call, repeats)
    return Time(*(round(float(np.quantile(values, share)), 5) for share in (0.5, 0.25, 0.75)))


def _on_cpu(call: Callable[[], Any], repeats: int) -> list[float]:
    values = []
    for _ in range(WARM_UP + repeats):
        started = time.perf_counter()
        call()
        values.append(1000 * (time.perf_counter() - started))
    return values[WARM_UP:]


def _on_gpu(call: Callable[[], Any], repeats: int) -> list[float]:
    evict = torch.empty(EVICT, dtype=torch.uint8, device="cuda")
    events = []
    for _ in range(WARM_UP + repeats):
        evict.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events[WARM_UP:]]


def capture(call: Callable[[], Any]) -> Callable[[], None]:
    """Return the replay of `call` as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def count_launches(call: Callable[[], Any]) -> int:
    """Return the number of kernels, copies and fills that `call` launches on a GPU."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def bytes_per_second(device: torch.device) -> float:
    """Return the memory bandwidth of a large copy, reads and writes counted."""
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * len(source) / (measure(lambda: target.copy_(source), device, 7).median / 1000)
