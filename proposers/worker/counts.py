"""Counts of steps and pruned drafts, from the worker to vLLM's log and `/metrics`.

On V1 the output of a step carries the pruned drafts to the scheduler; on V2 the scheduler computes them
(patches/scheduler.py). Tokens/step is over all steps, also those without drafts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import compress
from typing import Any

from prometheus_client import REGISTRY

from vllm_mtpc import METHODS

# Reasons why a draft was not verified: fewer were planned or scheduled, the step had no room for it (token budget,
# length, a grammar), or the request asked for fewer.
PRUNED_BY = ("schedule", "budget", "request")
CLASSES = ("greedy", "sampled", "structured")  # of requests, whose acceptance differs
OF_CLASS = ("steps", "draft_tokens", "accepted_tokens")
TIMES = ("step_us", "trial_us")  # microseconds of decoding, and what trials of the online plan lost of them
# "steps": steps of the target, summed over requests; each emits one token and the accepted drafts
NAMES = ("steps", *PRUNED_BY, *(f"{kind} {what}" for kind in CLASSES for what in OF_CLASS), *TIMES)
COSTS = "vllm_mtpc_costs"  # attribute of the first ModelRunnerOutput on CUDA: milliseconds of steps
DRAFTS = "vllm_mtpc_drafts"  # attribute of a ModelRunnerOutput on V1: vLLM's DraftTokenIds
PRUNED = "vllm_mtpc_pruned"  # attribute of a ModelRunnerOutput on V1: pruned drafts by reason
MINUTE = 60.0
PREFIXES = ("vllm_mtpc:", "vllm:")  # of our counters; the second is that of 0.3, to be removed in 0.5


def append_counts(stats: Any, counts: dict[str, int]) -> None:
    """Append counts to the K numbers of a list of vLLM's SpecDecodingStats; vLLM does not read them."""
    stats.num_draft_tokens_per_pos += [counts.get(name, 0) for name in NAMES]


def read_counts(stats: Any) -> Counter[str]:
    """Return the counts that were appended to a SpecDecodingStats; empty for other methods."""
    return Counter(dict(zip(NAMES, stats.num_draft_tokens_per_pos[stats.num_spec_tokens :], strict=False)))


def is_sampled(request: Any) -> bool:
    """Return whether one of vLLM's requests is sampled."""
    return request.sampling_params is None or request.sampling_params.temperature > 0


def class_name(request: Any) -> str:
    """Return which of CLASSES one of vLLM's requests belongs to."""
    return "structured" if request.use_structured_output else "sampled" if is_sampled(request) else "greedy"


def count_by_class(kinds: Mapping[str, str], verified: Mapping[str, Any], output: Any) -> dict[str, int]:
    """Return the counts of one step by the class of its requests.

    Args:
        kinds: classes by request id.
        verified: draft tokens by request id.
        output: vLLM's ModelRunnerOutput; a request whose prompt is not read to its end has no tokens.
    """
    served = [kinds.get(name) for name in compress(output.req_ids, output.sampled_token_ids)]
    counts = {"steps": len(served), **{f"{kind} steps": served.count(kind) for kind in CLASSES}}
    if verified:
        counts |= dict.fromkeys([f"{kind} {what}" for kind in CLASSES for what in OF_CLASS[1:]], 0)
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=False):
            if len(tokens) and (kind := kinds.get(name)):
                counts[f"{kind} draft_tokens"] += len(verified.get(name, ()))
                counts[f"{kind} accepted_tokens"] += len(tokens) - 1
    return counts


def logging_class(original: Any) -> type:
    """Return vLLM's SpecDecodingLogging with a line of ours after its first one and then once a minute."""

    class SpecDecodingLogging(original):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.counts, self.most, self.since, self.logged = Counter[str](), 0, 0.0, -MINUTE

        def observe(self, spec_decoding_stats: Any) -> None:
            super().observe(spec_decoding_stats)
            self.since = self.since or time.monotonic()
            self.counts.update(read_counts(spec_decoding_stats))
            self.counts["verified"] += spec_decoding_stats.num_draft_tokens
            self.counts["accepted"] += spec_decoding_stats.num_accepted_tokens
            self.most = spec_decoding_stats.num_spec_tokens

        def log(self, log_fn: Callable[..., None]) -> None:
            if sum(self.num_drafts) or not self.counts["steps"]:
                super().log(log_fn=log_fn)
            else:
                super().reset()  # vLLM's line is empty for steps without drafts
            if self.counts["steps"] and time.monotonic() >= self.logged + MINUTE:
                self.logged = time.monotonic()
                log_fn("%s", format_counts(self.counts, self.most, self.logged - self.since))
                self.counts, self.since = Counter[str](), 0.0

    return SpecDecodingLogging


def format_counts(counts: Counter[str], most: int, seconds: float) -> str:
    """Return one line for the log; counts: those of `counts.NAMES`, "verified" and "accepted"; most: K."""
    steps = counts["steps"]
    kinds = {kind: counts[f"{kind} steps"] for kind in CLASSES}
    means = [f"{kind} {1 + counts[f'{kind} accepted_tokens'] / of:.2f}" for kind, of in kinds.items() if of]
    by_kind = f" ({', '.join(means)})" if len(means) > 1 else ""
    pruned = [f"{name} {counts[name] / (steps * most):.0%}" for name in PRUNED_BY if counts[name] and most]
    trials = f"; trials of other numbers cost {counts['trial_us'] / counts['step_us']:.1%}" if counts["step_us"] else ""
    return (
        f"Drafts of the last {seconds:.0f} s: {1 + counts['accepted'] / steps:.2f} tokens/step over all {steps} steps"
        f"{by_kind}, without drafts 1.00; of {most} per step {counts['verified'] / steps:.1f} were verified and "
        f"{counts['accepted'] / steps:.1f} accepted{'; pruned by ' if pruned else ''}{', '.join(pruned)}{trials}"
    )


def prometheus_class(original: Any) -> type:
    """Return vLLM's SpecDecodingProm with counters of steps, pruned drafts and classes of requests."""

    class SpecDecodingProm(original):
        def __init__(self, spec: Any, names: list[str], labels: dict[int, list[Any]], **more: Any) -> None:
            super().__init__(spec, names, labels, **more)
            self.counters: dict[int, dict[str, list[Any]]] = {}  # by engine and name
            if getattr(spec, "method", None) not in METHODS:
                return
            for collector in list(REGISTRY._collector_to_names):  # of an earlier engine; vLLM unregisters its own
                if getattr(collector, "_name", "").startswith(PREFIXES[0]):
                    REGISTRY.unregister(collector)
            for prefix in PREFIXES:
                self.add_counters(f"{prefix}spec_decode", names, labels)

        def add_counters(self, prefix: str, names: list[str], labels: dict[int, list[Any]]) -> None:
            new = self._counter_cls
            steps = new(f"{prefix}_steps", "Steps of the target, summed over requests.", names)
            pruned = new(f"{prefix}_drafts_pruned", "Drafts not verified, by reason.", [*names, "by"])
            class_names, text = [*names, "request"], "by class of request."
            by_class = {what: new(f"{prefix}_class_{what}", f"{what} {text}", class_names) for what in OF_CLASS}
            for engine, values in labels.items():
                counters = {"steps": steps.labels(*values)}
                counters |= {name: pruned.labels(*values, name) for name in PRUNED_BY}
                for kind in CLASSES:
                    counters |= {f"{kind} {what}": counter.labels(*values, kind) for what, counter in by_class.items()}
                for name, counter in counters.items():
                    self.counters.setdefault(engine, {}).setdefault(name, []).append(counter)

        def observe(self, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
            if spec_decoding_stats.num_drafts:
                super().observe(spec_decoding_stats, engine_idx)
            if counters := self.counters.get(engine_idx):
                for name, count in read_counts(spec_decoding_stats).items():
                    for counter in counters.get(name, ()) if count else ():
                        counter.inc(count)

    return SpecDecodingProm
