"""Patches that carry what drafts cost, and what became of them, from the worker to vLLM's log and `/metrics`.

worker: a step's output takes along what its drafts have cost and which were cut -> scheduler: adds it, and the steps of
the target, to the step's figures of speculative decoding -> front end: counts and logs it. vLLM's own figures are of
steps that verified drafts; tokens/step here is over all steps. Nothing waits for a device (proposers/watch.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from vllm_mtpc import METHODS
from vllm_mtpc.proposers.seam.auto import OFF
from vllm_mtpc.proposers.seam.patch import Patch

DEBUG = "MTPC_DEBUG"
COST = "vllm_mtpc_draft_cost"  # attribute of a ModelRunnerOutput: values of DraftFigures's fields
CUTS = ("schedule", "survival", "budget")


def is_debug() -> bool:
    """Whether every rank's drafts are compared; costs a meeting of the ranks per step."""
    return os.environ.get(DEBUG, "0").strip().lower() not in ("", *OFF)


@dataclass
class DraftFigures:
    """Fields added to vLLM's SpecDecodingStats."""

    draft_seconds: float = 0.0
    draft_passes: int = 0
    steps: int = 0  # of the target, summed over requests: each gives one token and the drafts that were accepted
    cut_by_schedule: int = 0  # drafts that the head had room for and that were not verified, and why (watch.Cuts)
    cut_by_survival: int = 0
    cut_by_budget: int = 0

    def add(self, other: Any) -> None:
        """Counts the fields of another object that has them."""
        for one in fields(DraftFigures):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


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
            cost = getattr(model_runner_output, COST, None)
            if cost is None or not self.log_stats:
                return outputs
            figures = DraftFigures(
                **cost, steps=sum(len(tokens) > 0 for tokens in model_runner_output.sampled_token_ids)
            )
            for sent in outputs.values():
                if sent.scheduler_stats is not None:
                    if sent.scheduler_stats.spec_decoding_stats is None:  # a step that verified nothing
                        from vllm.v1.spec_decode.metrics import SpecDecodingStats

                        sent.scheduler_stats.spec_decoding_stats = SpecDecodingStats.new(self.num_spec_tokens)
                    vars(sent.scheduler_stats.spec_decoding_stats).update(vars(figures))
                    break
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
        original.__dataclass_fields__.update(DraftFigures.__dataclass_fields__)
        original.__annotations__.update(DraftFigures.__annotations__)
        for name in DraftFigures.__annotations__:
            setattr(original, name, getattr(DraftFigures, name))
        if "__msgspec_cache__" in vars(original):  # the fields as a decoder saw them before
            del original.__msgspec_cache__
        return original


class Logged(Patch):
    module = "vllm.v1.metrics.loggers"
    attribute = "SpecDecodingLogging"
    reason = "log tokens/step over all steps, what was cut and what a draft pass takes beside vLLM's figures of drafts"
    parameters = None

    @classmethod
    def replace(cls, original: Any) -> Any:
        class SpecDecodingLogging(original):
            def reset(self) -> None:
                super().reset()
                self.figures, self.most = DraftFigures(), 0

            def observe(self, spec_decoding_stats: Any) -> None:
                super().observe(spec_decoding_stats)
                self.figures.add(spec_decoding_stats)
                self.most = spec_decoding_stats.num_spec_tokens

            def log(self, log_fn: Callable[..., None]) -> None:
                figures, most, accepted = self.figures, self.most, sum(self.num_accepted_tokens)
                if sum(self.num_drafts):
                    super().log(log_fn=log_fn)
                if not figures.steps:
                    return
                if figures is self.figures:  # vLLM had nothing to log, and did not begin anew
                    self.reset()
                cuts = ", ".join(f"{name} {share:.0%}" for name, share in cut_shares(figures, most).items())
                mean = 1000 * figures.draft_seconds / max(figures.draft_passes, 1)
                log_fn(
                    "Tokens/step: %.2f over all %d steps; drafts cut by %s; %d draft passes, %.2f ms each",
                    1 + accepted / figures.steps, figures.steps, cuts, figures.draft_passes, mean,
                )  # fmt: skip

        return SpecDecodingLogging


def cut_shares(figures: Any, most: int) -> dict[str, float]:
    """By reason, the drafts that were cut, by all that the steps had room for."""
    return {name: getattr(figures, f"cut_by_{name}") / max(figures.steps * most, 1) for name in CUTS}


class Counted(Patch):
    module = "vllm.v1.metrics.loggers"
    attribute = "PrometheusStatLogger._spec_decoding_cls"
    reason = "count steps, cut drafts, draft passes and their seconds in /metrics"
    parameters = None

    @classmethod
    def replace(cls, original: Any) -> Any:
        class SpecDecodingProm(original):
            def __init__(self, spec: Any, names: list[str], labels: dict[int, list[Any]], **more: Any) -> None:
                super().__init__(spec, names, labels, **more)
                self.counters: dict[int, dict[str, Any]] = {}
                if getattr(spec, "method", None) in METHODS:
                    made = {
                        "draft_seconds": self._counter_cls(
                            "vllm:spec_decode_draft_seconds", "Seconds spent drafting.", names
                        ),
                        "draft_passes": self._counter_cls(
                            "vllm:spec_decode_draft_passes", "Passes that drafted.", names
                        ),
                        "steps": self._counter_cls(
                            "vllm:spec_decode_steps", "Steps of the target, over requests.", names
                        ),
                    }
                    cut = self._counter_cls(
                        "vllm:spec_decode_drafts_cut", "Drafts not verified, and why.", [*names, "by"]
                    )
                    for engine, of in labels.items():
                        self.counters[engine] = {name: counter.labels(*of) for name, counter in made.items()}
                        self.counters[engine] |= {f"cut_by_{name}": cut.labels(*of, name) for name in CUTS}

            def observe(self, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
                super().observe(spec_decoding_stats, engine_idx)
                for name, counter in self.counters.get(engine_idx, {}).items():
                    counter.inc(getattr(spec_decoding_stats, name))

        return SpecDecodingProm


PATCHES: tuple[type[Patch], ...] = (WorkerSampleTokens, SchedulerUpdateFromOutput, StatsFields, Logged, Counted)
