"""Steps and pruned drafts in vLLM's log and `/metrics`; tokens/step is over all steps, also those without drafts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm_mtpc import METHODS
from vllm_mtpc.proposers.heads.counts import CLASSES, OF_CLASS, PRUNED_BY, read_counts

MINUTE = 60.0


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
    return (
        f"Drafts of the last {seconds:.0f} s: {1 + counts['accepted'] / steps:.2f} tokens/step over all {steps} steps"
        f"{by_kind}, without drafts 1.00; of {most} per step {counts['verified'] / steps:.1f} were verified and "
        f"{counts['accepted'] / steps:.1f} accepted{'; pruned by ' if pruned else ''}{', '.join(pruned)}"
    )


def prometheus_class(original: Any) -> type:
    class SpecDecodingProm(original):
        def __init__(self, spec: Any, names: list[str], labels: dict[int, list[Any]], **more: Any) -> None:
            super().__init__(spec, names, labels, **more)
            self.counters: dict[int, dict[str, Any]] = {}
            if getattr(spec, "method", None) not in METHODS:
                return
            new = self._counter_cls
            steps = new("vllm:spec_decode_steps", "Steps of the target, summed over requests.", names)
            pruned = new("vllm:spec_decode_drafts_pruned", "Drafts not verified, by reason.", [*names, "by"])
            class_names, text = [*names, "request"], "by class of request."
            by_kind = {what: new(f"vllm:spec_decode_class_{what}", f"{what} {text}", class_names) for what in OF_CLASS}
            for engine, of in labels.items():
                counters = {"steps": steps.labels(*of), **{name: pruned.labels(*of, name) for name in PRUNED_BY}}
                for kind in CLASSES:
                    counters |= {f"{kind} {what}": one.labels(*of, kind) for what, one in by_kind.items()}
                self.counters[engine] = counters

        def observe(self, spec_decoding_stats: Any, engine_idx: int = 0) -> None:
            super().observe(spec_decoding_stats, engine_idx)
            if counters := self.counters.get(engine_idx):
                for name, count in read_counts(spec_decoding_stats).items():
                    counters[name].inc(count)

    return SpecDecodingProm
