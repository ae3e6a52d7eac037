"""What a configuration with a head changes in its own process: the classes it names, the counts that are logged.

Steps and cut drafts are in vLLM's log and `/metrics`: tokens/step is over all steps, those without drafts too. A plugin
of vLLM's group `stat_logger_plugins` would need no patch, but is made for every engine of the environment, turns
--disable-log-stats off, and is not asked by `LLM`.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm.config.scheduler import SchedulerConfig

from vllm_mtpc import METHODS
from vllm_mtpc.proposers.config import request
from vllm_mtpc.proposers.heads.counts import CLASSES, CUTS, OF_CLASS, counts_of
from vllm_mtpc.proposers.patches.patch import apply, declared, derived, patch

LOGGERS = "vllm.v1.metrics.loggers"
MINUTE = 60.0


def name_our_classes(vllm_config: Any) -> None:
    """Have the engine of this configuration made of our worker and scheduler, and its front end count what they say."""
    apply(*declared(sys.modules[__name__]))
    parallel = vllm_config.parallel_config  # worker.py has a worker for each of vLLM's, by its name with ":" for "."
    parallel.worker_cls = f"vllm_mtpc.proposers.patches.worker.{parallel.worker_cls.replace('.', ':')}"
    vllm_config.scheduler_config.__class__ = HeadSchedulerConfig


class HeadSchedulerConfig(SchedulerConfig):
    """vLLM's, whose scheduler is derived from the one it would choose: its field `scheduler_cls` warns, and names one
    class for both synchronous and asynchronous scheduling."""

    def get_scheduler_cls(self) -> type:
        from vllm_mtpc.proposers.patches.scheduler import HeadScheduler

        return derived(HeadScheduler, super().get_scheduler_cls())


@patch(
    "vllm.sampling_params",
    "SamplingParams._validate_spec_decode",
    needs=("self", "speculative_config"),
    why="refuse a request that asks for drafts it cannot have; serve without drafts what vLLM does not with them",
)
def validate_spec_decode(original: Callable[..., None], self: Any, speculative_config: Any) -> None:
    if getattr(speculative_config, "method", None) in METHODS:
        request.check(self, speculative_config.num_speculative_tokens)
        if not request.drafts_of(self, 1):  # what vLLM has against drafts
            return
    original(self, speculative_config)


@patch(LOGGERS, "SpecDecodingLogging", why="say once a minute what drafts bring, over all steps")
def logged(original: Any) -> Any:
    class SpecDecodingLogging(original):
        """vLLM's, every ten seconds, and a line of ours with the first of them, then once a minute."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.counts, self.most, self.since, self.said = Counter[str](), 0, 0.0, -MINUTE

        def observe(self, spec_decoding_stats: Any) -> None:
            super().observe(spec_decoding_stats)
            self.since = self.since or time.monotonic()
            self.counts.update(counts_of(spec_decoding_stats))
            self.counts["verified"] += spec_decoding_stats.num_draft_tokens
            self.counts["accepted"] += spec_decoding_stats.num_accepted_tokens
            self.most = spec_decoding_stats.num_spec_tokens

        def log(self, log_fn: Callable[..., None]) -> None:
            if sum(self.num_drafts) or not self.counts["steps"]:
                super().log(log_fn=log_fn)
            else:
                super().reset()  # of steps without a draft vLLM's line would say nothing
            if self.counts["steps"] and time.monotonic() >= self.said + MINUTE:
                self.said = time.monotonic()
                log_fn("%s", in_words(self.counts, self.most, self.said - self.since))
                self.counts, self.since = Counter[str](), 0.0

    return SpecDecodingLogging


def in_words(counts: Counter[str], most: int, seconds: float) -> str:
    """What drafts brought, in a line; counts of NAMES, "verified" and "accepted"; most: K."""
    steps = counts["steps"]
    kinds = {kind: counts[f"{kind} steps"] for kind in CLASSES}
    means = [f"{kind} {1 + counts[f'{kind} accepted_tokens'] / of:.2f}" for kind, of in kinds.items() if of]
    by_kind = f" ({', '.join(means)})" if len(means) > 1 else ""
    cuts = [f"{name} {counts[name] / (steps * most):.0%}" for name in CUTS if counts[name] and most]
    return (
        f"Drafts of the last {seconds:.0f} s: {1 + counts['accepted'] / steps:.2f} tokens/step over all {steps} steps"
        f"{by_kind}, without drafts 1.00; of {most} a step {counts['verified'] / steps:.1f} were verified and "
        f"{counts['accepted'] / steps:.1f} accepted{'; not verified by ' if cuts else ''}{', '.join(cuts)}"
    )


@patch(LOGGERS, "PrometheusStatLogger._spec_decoding_cls", why="count steps and cut drafts in /metrics")
def counted(original: Any) -> Any:
    class SpecDecodingProm(original):
        def __init__(self, spec: Any, names: list[str], labels: dict[int, list[Any]], **more: Any) -> None:
            super().__init__(spec, names, labels, **more)
            self.counters: dict[int, dict[str, Any]] = {}
            if getattr(spec, "method", None) in METHODS:
                kinds, new = [*names, "request"], self._counter_cls
                steps = new("vllm:spec_decode_steps", "Steps of the target, over requests.", names)
                cut = new("vllm:spec_decode_drafts_cut", "Drafts not verified, and why.", [*names, "by"])
                by_kind = {
                    what: new(f"vllm:spec_decode_class_{what}", f"Of requests of a class: {what}.", kinds)
                    for what in OF_CLASS
                }
                for engine, of in labels.items():
                    counters = {name: cut.labels(*of, name) for name in CUTS}
                    for kind in CLASSES:
                        counters |= {f"{kind} {what}": one.labels(*of, kind) for what, one in by_kind.items()}
                    self.counters[engine] = {"steps": steps.labels(*of), **counters}

        def observe(self, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
            super().observe(spec_decoding_stats, engine_idx)
            if counters := self.counters.get(engine_idx):
                for name, count in counts_of(spec_decoding_stats).items():
                    counters[name].inc(count)

    return SpecDecodingProm
