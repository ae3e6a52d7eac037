"""What a configuration with a head changes in its own process: the classes it names, the counts that are logged.

Steps and cut drafts are in vLLM's log and `/metrics`: tokens/step is over all steps, those without drafts too. A plugin
of vLLM's group `stat_logger_plugins` would need no patch, but is made for every engine of the environment, turns
--disable-log-stats off, and is not asked by `LLM`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.config.scheduler import SchedulerConfig

from vllm_mtpc import METHODS
from vllm_mtpc.proposers.config import request
from vllm_mtpc.proposers.heads.counts import CUTS, counts_of
from vllm_mtpc.proposers.seam.patch import apply, declared, derived, patch

LOGGERS = "vllm.v1.metrics.loggers"


def name_our_classes(vllm_config: Any) -> None:
    """Have the engine of this configuration made of our worker and scheduler, and its front end count what they say."""
    apply(*declared(sys.modules[__name__]))
    parallel = vllm_config.parallel_config  # worker.py has a worker for each of vLLM's, by its name with ":" for "."
    parallel.worker_cls = f"vllm_mtpc.proposers.seam.worker.{parallel.worker_cls.replace('.', ':')}"
    vllm_config.scheduler_config.__class__ = HeadSchedulerConfig


class HeadSchedulerConfig(SchedulerConfig):
    """vLLM's, whose scheduler is derived from the one it would choose: its field `scheduler_cls` warns, and names one
    class for both synchronous and asynchronous scheduling."""

    def get_scheduler_cls(self) -> type:
        from vllm_mtpc.proposers.seam.scheduler import HeadScheduler

        return derived(HeadScheduler, super().get_scheduler_cls())


@patch(
    "vllm.sampling_params",
    "SamplingParams._validate_spec_decode",
    needs=("self", "speculative_config"),
    why="refuse a request that asks for drafts it cannot have",
)
def validate_spec_decode(original: Callable[..., None], self: Any, speculative_config: Any) -> None:
    original(self, speculative_config)
    if self.extra_args and getattr(speculative_config, "method", None) in METHODS:
        request.check(self.extra_args, speculative_config.num_speculative_tokens)


@patch(LOGGERS, "SpecDecodingLogging", why="log tokens/step over all steps and what was cut beside vLLM's line")
def logged(original: Any) -> Any:
    class SpecDecodingLogging(original):
        def reset(self) -> None:
            super().reset()
            self.counts, self.most = Counter[str](), 0

        def observe(self, spec_decoding_stats: Any) -> None:
            super().observe(spec_decoding_stats)
            self.counts.update(counts_of(spec_decoding_stats))
            self.most = spec_decoding_stats.num_spec_tokens

        def log(self, log_fn: Callable[..., None]) -> None:
            counts, room, accepted = self.counts, self.counts["steps"] * self.most, sum(self.num_accepted_tokens)
            if sum(self.num_drafts) or not room:
                super().log(log_fn=log_fn)
            if not room:
                return
            if counts is self.counts:  # vLLM had nothing to log, and did not begin anew
                self.reset()
            cuts = ", ".join(f"{name} {counts[name] / room:.0%}" for name in CUTS)
            mean, steps = 1 + accepted / counts["steps"], counts["steps"]
            log_fn("Tokens/step: %.2f over all %d steps; drafts cut by %s", mean, steps, cuts)

    return SpecDecodingLogging


@patch(LOGGERS, "PrometheusStatLogger._spec_decoding_cls", why="count steps and cut drafts in /metrics")
def counted(original: Any) -> Any:
    class SpecDecodingProm(original):
        def __init__(self, spec: Any, names: list[str], labels: dict[int, list[Any]], **more: Any) -> None:
            super().__init__(spec, names, labels, **more)
            self.counters: dict[int, dict[str, Any]] = {}
            if getattr(spec, "method", None) in METHODS:
                steps = self._counter_cls("vllm:spec_decode_steps", "Steps of the target, over requests.", names)
                cut = self._counter_cls("vllm:spec_decode_drafts_cut", "Drafts not verified, and why.", [*names, "by"])
                for engine, of in labels.items():
                    by = {name: cut.labels(*of, name) for name in CUTS}
                    self.counters[engine] = {"steps": steps.labels(*of), **by}

        def observe(self, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
            super().observe(spec_decoding_stats, engine_idx)
            if counters := self.counters.get(engine_idx):
                for name, count in counts_of(spec_decoding_stats).items():
                    counters[name].inc(count)

    return SpecDecodingProm
