"""Times of a call: warmed up, repeated, told as median and quartiles; and what a device reads per second."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any, NamedTuple

WARM_UP = 5
EVICT = 256 << 20  # bytes written between calls on a GPU: weights that a step would read from memory come from memory
COPIED = {"cpu": 256 << 20, "cuda": 2 << 30}  # bytes; beyond every cache


class Time(NamedTuple):
    """Milliseconds of a call."""

    median: float
    lower: float  # quartiles
    upper: float

    def to_json(self) -> list[float]:
        return [round(value, 5) for value in self]


def measure(call: Callable[[], Any], device: Any, repeats: int) -> Time:
    """Times `call`, which works on torch device `device`; on a GPU by events, its caches overwritten in between."""
    values = _on_gpu(call, repeats) if device.type == "cuda" else _on_cpu(call, repeats)
    if repeats == 1:
        return Time(values[0], values[0], values[0])
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return Time(median(values), lower, upper)


def _on_cpu(call: Callable[[], Any], repeats: int) -> list[float]:
    values = []
    for _ in range(WARM_UP + repeats):
        started = time.perf_counter()
        call()
        values.append(1000 * (time.perf_counter() - started))
    return values[WARM_UP:]


def _on_gpu(call: Callable[[], Any], repeats: int) -> list[float]:
    import torch

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


def captured(call: Callable[[], Any]) -> Callable[[], None] | None:
    """The call as one CUDA graph; None where it cannot be captured."""
    import torch

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        return None
    return graph.replay


def launches(call: Callable[[], Any]) -> int | None:
    """Kernels, copies and fills that a call launches on a GPU; None where the profiler sees none."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events()) or None


def bytes_per_second(device: Any) -> float:
    """Bandwidth of the device's memory as a large copy has it, reads and writes counted."""
    import torch

    size = COPIED[device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (measure(lambda: target.copy_(source), device, 7).median / 1000)
