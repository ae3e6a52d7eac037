"""Times of a call: warmed up, repeated, told as median and quartiles; a device's bandwidth; tables of times."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_mtpc.engine import provenance
from vllm_mtpc.kernels.filter.program import Program
from vllm_mtpc.report import print_table, write_json

WARM_UP = 5
EVICT = 256 << 20  # bytes written between calls on a GPU: weights that a step would read from memory come from memory
COPIED = {"cpu": 256 << 20, "cuda": 2 << 30}  # bytes; beyond every cache


class Time(NamedTuple):
    """Milliseconds of a call, in a result a list."""

    median: float
    lower: float  # quartiles
    upper: float


def measure(call: Callable[[], Any], device: Any, repeats: int) -> Time:
    """Times `call`, which works on torch device `device`; on a GPU by events, its caches overwritten in between."""
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


def captured(call: Callable[[], Any]) -> Callable[[], None] | None:
    """The call as one CUDA graph; None where it cannot be captured."""
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
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in seen.events()) or None


def bytes_per_second(device: Any) -> float:
    """Bandwidth of the device's memory as a large copy has it, reads and writes counted."""
    size = COPIED[device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (measure(lambda: target.copy_(source), device, 7).median / 1000)


def draft_kernel(
    program: Program, shape: tuple[int, int, int, int], temperature: float, device: torch.device, support: int = 0
) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """The draft kernel as Model Runner V2 calls it, with buffers of its own; a GPU's, or an interpreter's.

    The call drafts from `DraftParams` whose leaf has the shape [B, K, r, V], or within a support [B, K, r, support].
    """
    from vllm_mtpc.engine.noise import gumbel_noised_argmax  # needs Triton
    from vllm_mtpc.kernels.draft.kernel import Drafter

    batch, drafts, r, vocab_size = shape
    drafter = Drafter(program, r, vocab_size, device, gumbel_noised_argmax, support=support)
    slots = torch.arange(batch, dtype=torch.int32, device=device)
    given = {
        "slots": slots,
        "temperature": torch.full((batch,), temperature, device=device),
        "seeds": slots.long(),
        "pos": slots.long(),
        "tokens": torch.zeros(batch, drafts, dtype=torch.int64, device=device),
        "confidences": torch.zeros(batch, drafts, device=device),
        "cache": torch.zeros(batch, drafts, vocab_size, device=device),
    }

    def draft(params: tuple[Tensor, ...]) -> Tensor:
        drafter(*params, **given)
        return given["tokens"]

    return draft


Shown = str | Callable[[Any], Any]  # a key of a row, or what is made of the row
Column = tuple[str, Shown] | tuple[str, Shown, str]


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Header and lines, a column for each (header, key of a row or what to show of it, format); None is shown as -."""

    def cell(row: Mapping[str, Any], what: Any, form: str = "{}") -> str:
        value = what(row) if callable(what) else row[what]
        return "-" if value is None else form.format(value)

    return [name for name, *_ in columns], [[cell(row, *column[1:]) for column in columns] for row in rows]


def publish(
    file: Path | None,
    kind: str,
    title: str,
    columns: Sequence[Column],
    notes: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    definitions: Sequence[str],
    **values: Any,
) -> None:
    """Prints a result of times, notes and definitions below its table; writes it where a file is named."""
    print_table(title, *table(rows, columns))
    print("\n".join(["", *notes, *definitions]))
    if file:
        values = {"definitions": list(definitions), **values, "rows": rows}
        write_json(file, {"kind": kind, **provenance.collect(), **values})
