"""What drafts cost, and what became of them: from the worker to vLLM's log and `/metrics`.

model runner (v1/runner.py, v2/runner.py): a step's output takes along what its drafts have cost and which were cut ->
scheduler (seam/scheduler.py): puts it, and the steps of the target, behind the step's figures of speculative decoding
-> front end: counts and logs it. vLLM's own figures are of steps that verified drafts; tokens/step here is over all
steps. Nothing waits for a device (proposers/watch.py).

The two patches below are put in force where a head is configured. A plugin of vLLM's group `stat_logger_plugins` would
need none, but is made for every engine of the environment, turns --disable-log-stats off, and is not asked by `LLM`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from typing import Any

from vllm_mtpc import METHODS
from vllm_mtpc.proposers.seam.auto import OFF
from vllm_mtpc.proposers.seam.patch import Patch

DEBUG = "MTPC_DEBUG"
COST = "vllm_mtpc_draft_cost"  # attribute of a ModelRunnerOutput: fields of DraftFigures but `steps`
IDLE = "vllm_mtpc_idle"  # attribute of a ModelRunnerOutput: the head that the target ships has failed
CUTS = ("schedule", "survival", "budget")


def is_debug() -> bool:
    """Whether every rank's drafts are compared; costs a meeting of the ranks per step."""
    return os.environ.get(DEBUG, "0").strip().lower() not in ("", *OFF)


@dataclass
class DraftFigures:
    """What a step's drafts have cost, and what was cut."""

    draft_seconds: float = 0.0
    draft_passes: int = 0
    steps: int = 0  # of the target, summed over requests: each gives one token and the drafts that were accepted
    cut_by_schedule: int = 0  # drafts that the head had room for and that were not verified, and why (watch.Cuts)
    cut_by_survival: int = 0
    cut_by_budget: int = 0

    def add(self, other: DraftFigures) -> None:
        for one in fields(DraftFigures):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def put_into(self, stats: Any) -> None:
        """Behind the K counts of a list of vLLM's SpecDecodingStats: between its processes nothing is sent but what the
        class declares. Nothing of vLLM reads that list."""
        seconds, *counts = astuple(self)
        stats.num_draft_tokens_per_pos += [round(seconds * 1e6), *counts]

    @classmethod
    def of(cls, stats: Any) -> DraftFigures:
        """What was put into a SpecDecodingStats; zeros where nothing was: other methods, other engines."""
        microseconds, *counts = stats.num_draft_tokens_per_pos[stats.num_spec_tokens :] or [0]
        return cls(microseconds / 1e6, *counts)


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
                self.figures.add(DraftFigures.of(spec_decoding_stats))
                self.most = spec_decoding_stats.num_spec_tokens

            def log(self, log_fn: Callable[..., None]) -> None:
                figures, most, accepted = self.figures, self.most, sum(self.num_accepted_tokens)
                if sum(self.num_drafts) or not figures.steps:
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
                if counters := self.counters.get(engine_idx):
                    figures = DraftFigures.of(spec_decoding_stats)
                    for name, counter in counters.items():
                        counter.inc(getattr(figures, name))

        return SpecDecodingProm


PATCHES: tuple[type[Patch], ...] = (Logged, Counted)
