"""Tokens per step and acceptance per position, from vLLM's counters of speculative decoding."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import zip_longest

DEFINITIONS = (
    "tokens/step: tokens a request gains in one step of the target, the target's own token included, over all steps "
    "(plain decoding is 1.00).\n"
    "acceptance per position: drafts accepted at position k, divided by all drafted steps (unconditional)."
)
_PREFIX = "vllm:spec_decode_"
_STEPS = "vllm_mtpc:spec_decode_steps"  # our own; the name with vLLM's prefix counts the same steps
_OUTPUTS = ("vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count")  # of all requests


@dataclass(frozen=True)
class Acceptance:
    """Counters of the drafts of a run; all zero without drafts."""

    drafts: int = 0  # steps of single requests that carried drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    steps: int = 0  # of single requests, all of them: by a head's counter, else those that returned tokens

    @property
    def tokens_per_step(self) -> float:
        """Mean over all steps if they are counted, else over those with drafts."""
        return 1.0 + self.accepted_tokens / self.steps if self.steps else self.tokens_per_drafted_step

    @property
    def tokens_per_drafted_step(self) -> float:
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def per_position(self) -> tuple[float, ...]:
        return tuple(count / self.drafts for count in self.accepted_per_position) if self.drafts else ()

    def __add__(self, other: Acceptance, sign: int = 1) -> Acceptance:
        positions = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return Acceptance(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted_tokens + sign * other.accepted_tokens,
            tuple(mine + sign * its for mine, its in positions),
            self.steps + sign * other.steps,
        )

    def __sub__(self, earlier: Acceptance) -> Acceptance:
        return self.__add__(earlier, -1)

    @classmethod
    def read(cls, metrics: str) -> Acceptance:
        """Read the text of a server's /metrics: counters since its start, summed over engines."""
        from prometheus_client.parser import text_string_to_metric_families

        found, accepted, outputs, steps = Counter[str](), Counter[int](), 0, 0  # by name; by position
        for family in text_string_to_metric_families(metrics):
            outputs += sum(int(sample.value) for sample in family.samples if sample.name in _OUTPUTS)
            steps += sum(int(sample.value) for sample in family.samples if sample.name == f"{_STEPS}_total")
            for sample in family.samples if family.name.startswith(f"{_PREFIX}num_") else ():
                found[sample.name.removeprefix(_PREFIX).removesuffix("_total")] += int(sample.value)
                if "position" in sample.labels and sample.name.endswith("_total"):
                    accepted[int(sample.labels["position"])] += int(sample.value)
        per_position = tuple(count for _, count in sorted(accepted.items()))
        counts = found["num_drafts"], found["num_draft_tokens"], found["num_accepted_tokens"]
        return cls(*counts, per_position, steps or (outputs if found else 0))
