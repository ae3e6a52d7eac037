"""Patches that carry the time of drafts from the worker to vLLM's log and `/metrics`.

worker: a step's output takes along what its drafts have cost -> scheduler: adds it to the step's figures of speculative
decoding -> front end: counts and logs it. Nothing waits for a device (proposers/watch.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_mtpc import METHODS
from vllm_mtpc.proposers.seam.auto import OFF
from vllm_mtpc.proposers.seam.patch import Patch

DEBUG = "VLLM_MTPC_DEBUG"
COST = "vllm_mtpc_draft_cost"  # attribute of a ModelRunnerOutput: (seconds, passes)


def is_debug() -> bool:
    """Whether every rank's drafts are compared; costs a meeting of the ranks per step."""
    return os.environ.get(DEBUG, "0").strip().lower() not in ("", *OFF)


@dataclass
class DraftCost:
    """Fields added to vLLM's SpecDecodingStats."""

    draft_seconds: float = 0.0
    draft_passes: int = 0


class WorkerSampleTokens(Patch):
    module = "vllm.v1.worker.gpu_worker"
    attribute = "Worker.sample_tokens"
    reason = "send what drafts have cost along with a step's output"
    parameters = ("self",)

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            runner = self.model_runner
            drafter = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
            made = getattr(output, "model_runner_output", output)
            if hasattr(drafter, "clock") and getattr(made, "req_ids", None):
                setattr(made, COST, drafter.clock.take())
            return output

        return sample_tokens


class SchedulerUpdateFromOutput(Patch):
    module = "vllm.v1.core.sched.scheduler"
    attribute = "Scheduler.update_from_output"
    reason = "add what drafts have cost to the figures that the front end gets"
    parameters = ("self", "scheduler_output", "model_runner_output")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
            outputs = original(self, scheduler_output, model_runner_output)
            if (cost := getattr(model_runner_output, COST, None)) is None:
                return outputs
            before = getattr(self, COST, (0.0, 0))  # of steps that verified nothing, whose figures are empty
            total = cost[0] + before[0], cost[1] + before[1]
            for sent in outputs.values():
                stats = getattr(sent.scheduler_stats, "spec_decoding_stats", None)
                if stats is not None:
                    stats.draft_seconds, stats.draft_passes = total
                    total = 0.0, 0
            setattr(self, COST, total)
            return outputs

        return update_from_output


class StatsFields(Patch):
    module = "vllm.v1.spec_decode.metrics"
    attribute = "SpecDecodingStats"
    reason = "let vLLM's figures of speculative decoding carry what drafts have cost between its processes"
    parameters = None

    @classmethod
    def replace(cls, original: Any) -> Any:
        """The class itself with two more fields: others have imported it, and vLLM's decoder reads what it declares."""
        original.__dataclass_fields__.update(DraftCost.__dataclass_fields__)
        original.__annotations__.update(DraftCost.__annotations__)
        for name in DraftCost.__annotations__:
            setattr(original, name, getattr(DraftCost, name))
        if "__msgspec_cache__" in vars(original):  # the fields as a decoder saw them before
            del original.__msgspec_cache__
        return original


class Logged(Patch):
    module = "vllm.v1.metrics.loggers"
    attribute = "SpecDecodingLogging"
    reason = "log what a draft pass takes beside vLLM's figures of drafts"
    parameters = None

    @classmethod
    def replace(cls, original: Any) -> Any:
        class SpecDecodingLogging(original):
            def reset(self) -> None:
                super().reset()
                self.cost = DraftCost()

            def observe(self, spec_decoding_stats: Any) -> None:
                super().observe(spec_decoding_stats)
                self.cost.draft_seconds += spec_decoding_stats.draft_seconds
                self.cost.draft_passes += spec_decoding_stats.draft_passes

            def log(self, log_fn: Callable[..., None]) -> None:
                cost = self.cost
                super().log(log_fn=log_fn)
                if cost is not self.cost and cost.draft_passes:  # vLLM has logged, and begun anew
                    mean = 1000 * cost.draft_seconds / cost.draft_passes
                    log_fn("Draft passes: %d, %.2f ms each", cost.draft_passes, mean)

        return SpecDecodingLogging


class Counted(Patch):
    module = "vllm.v1.metrics.loggers"
    attribute = "PrometheusStatLogger._spec_decoding_cls"
    reason = "count draft passes and their seconds in /metrics"
    parameters = None

    @classmethod
    def replace(cls, original: Any) -> Any:
        class SpecDecodingProm(original):
            def __init__(self, spec: Any, names: list[str], labels: dict[int, list[Any]], **more: Any) -> None:
                super().__init__(spec, names, labels, **more)
                self.costs: dict[int, tuple[Any, Any]] = {}
                if getattr(spec, "method", None) in METHODS:
                    seconds = self._counter_cls("vllm:spec_decode_draft_seconds", "Seconds spent drafting.", names)
                    passes = self._counter_cls("vllm:spec_decode_draft_passes", "Passes that drafted.", names)
                    self.costs = {engine: (seconds.labels(*of), passes.labels(*of)) for engine, of in labels.items()}

            def observe(self, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
                super().observe(spec_decoding_stats, engine_idx)
                if engine_idx in self.costs:
                    seconds, passes = self.costs[engine_idx]
                    seconds.inc(spec_decoding_stats.draft_seconds)
                    passes.inc(spec_decoding_stats.draft_passes)

        return SpecDecodingProm


PATCHES: tuple[type[Patch], ...] = (WorkerSampleTokens, SchedulerUpdateFromOutput, StatsFields, Logged, Counted)
