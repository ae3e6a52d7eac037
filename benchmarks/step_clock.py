"""What a decoding step takes inside an engine: the whole, the target's part, the draft.

The model runner's own methods are timed where they are called, the same for every way of drafting: `execute_model` and
`sample_tokens` are the target's part (the target's pass, sampling, verification), less the draft inside of the latter.
On a CPU the clock is the host's; on a GPU, events on the stream, read after the pass, so that nothing waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

DEFINITIONS = (
    "step ms: from the begin of one decoding step to the begin of the next, the engine's own work included; median.\n"
    "draft ms: the method that drafts, inside the step; target ms: the target's pass, sampling and verification, "
    "without it; medians. A PTP head's merged pass is the target's, its rows included.\n"
    "draft share: draft ms by step ms."
)


@dataclass(frozen=True)
class Steps:
    """Decoding steps of a pass. Times are of steps in which no prompt was read."""

    count: int  # steps without a prompt
    request_steps: int  # requests that decoded, summed over all steps
    rows: int  # tokens the target read for them, drafts included
    step_ms: float
    target_ms: float
    draft_ms: float


@dataclass
class StepRecord:
    started: float  # host, seconds
    requests: int  # that decode
    rows: int
    is_decoding: bool  # no request reads its prompt
    spans: dict[str, tuple[Any, Any]] = field(default_factory=dict)


class StepClock:
    """Times the steps of one model runner from now on; `read` sums up what is in `records`."""

    def __init__(self, runner: Any) -> None:
        self.on_gpu = runner.device.type == "cuda"
        self.records: list[StepRecord] = []
        drafter, name = draft_method(runner)
        if drafter is not None:
            setattr(drafter, name, self._timed("draft", getattr(drafter, name)))
        runner.sample_tokens = self._timed("sample", runner.sample_tokens)
        execute = self._timed("execute", runner.execute_model)

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.records.append(_record(scheduler_output))
            return execute(scheduler_output, *args, **kwargs)

        runner.execute_model = execute_model

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._stamp()
            answer = call(*args, **kwargs)
            if self.records:
                self.records[-1].spans[name] = (begin, self._stamp())
            return answer

        return timed

    def _stamp(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _milliseconds(self, record: StepRecord, name: str) -> float:
        if name not in record.spans:
            return 0.0
        begin, end = record.spans[name]
        return begin.elapsed_time(end) if self.on_gpu else 1000 * (end - begin)

    def decoding(self) -> Iterator[tuple[StepRecord, float, float, float]]:
        """Steps without a prompt that another step follows; the whole, the target's part and the draft in ms."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()
        for record, following in pairwise(self.records):
            if record.is_decoding:
                execute, sample, draft = (self._milliseconds(record, name) for name in ("execute", "sample", "draft"))
                yield record, 1000 * (following.started - record.started), execute + sample - draft, draft

    def read(self) -> Steps | None:
        """None where no two steps followed each other."""
        times = [of_step for _, *of_step in self.decoding()]
        if not times:
            return None
        count = sum(record.is_decoding for record in self.records)
        requests, rows = sum(record.requests for record in self.records), sum(record.rows for record in self.records)
        return Steps(count, requests, rows, *(round(median(part), 4) for part in zip(*times, strict=True)))


def _record(scheduler_output: Any) -> StepRecord:
    new = {request.req_id for request in scheduler_output.scheduled_new_reqs}
    drafts = scheduler_output.scheduled_spec_decode_tokens  # request -> its drafts
    scheduled = scheduler_output.num_scheduled_tokens  # request -> tokens, drafts included
    rows = [n for name, n in scheduled.items() if name not in new and n == 1 + len(drafts.get(name, ()))]
    return StepRecord(time.perf_counter(), len(rows), sum(rows), bool(rows) and len(rows) == len(scheduled))


def draft_method(runner: Any) -> tuple[Any, str]:
    """Whose method, and its name, drafts on a model runner; (None, "") where nothing does."""
    if is_v2(runner):
        return (runner.speculator, "propose") if runner.speculator is not None else (None, "")
    return (runner, "propose_draft_token_ids") if runner.speculative_config is not None else (None, "")


def is_v2(runner: Any) -> bool:
    return any(base.__module__ == "vllm.v1.worker.gpu.model_runner" for base in type(runner).__mro__)


def runner_of(llm: Any) -> Any:
    """The model runner of an engine that lives in this process; None where it is in another."""
    return getattr(worker_of(llm), "model_runner", None)


def worker_of(llm: Any) -> Any:
    """Its worker, likewise."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    worker = getattr(getattr(core, "model_executor", None), "driver_worker", None)
    return getattr(worker, "worker", worker)
