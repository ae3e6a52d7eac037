"""Tokens per step and acceptance per position, from the counters vLLM keeps about speculative decoding.

Nothing is measured here that vLLM does not measure itself: the counters are read before and after, and subtracted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

DEFINITIONS = (
    "tokens/step: tokens a request gains in one forward pass of the target, the target's own token included "
    "(plain decoding is 1.00).\n"
    "acceptance per position: drafts accepted at position k, divided by all drafted steps (unconditional)."
)

_PREFIX = "vllm:spec_decode_num_"
_SAMPLE = re.compile(rf"^{_PREFIX}(\w+?)_total(?:\{{(.*)\}})? (\S+)$")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Acceptance:
    """What became of the drafts of a run. Without drafts all counters are zero."""

    drafts: int = 0  # steps of single requests that carried drafts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @property
    def tokens_per_step(self) -> float:
        return 1.0 + self.accepted_tokens / self.drafts if self.drafts else 1.0

    @property
    def per_position(self) -> tuple[float, ...]:
        return tuple(count / self.drafts for count in self.accepted_per_position) if self.drafts else ()

    def __add__(self, other: Acceptance, sign: int = 1) -> Acceptance:
        pairs = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return Acceptance(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted_tokens + sign * other.accepted_tokens,
            tuple(mine + sign * its for mine, its in pairs),
        )

    def __sub__(self, earlier: Acceptance) -> Acceptance:
        return self.__add__(earlier, -1)

    @classmethod
    def _from_samples(cls, samples: Iterable[tuple[str, int | None, int]]) -> Acceptance:
        """Sums samples (counter name without prefix, position or None, value) over engines."""
        totals: dict[str, int] = {}
        positions: dict[int, int] = {}
        for name, position, value in samples:
            if position is None:
                totals[name] = totals.get(name, 0) + value
            else:
                positions[position] = positions.get(position, 0) + value
        return cls(
            totals.get("drafts", 0),
            totals.get("draft_tokens", 0),
            totals.get("accepted_tokens", 0),
            tuple(positions[key] for key in sorted(positions)),
        )

    @classmethod
    def from_llm(cls, metrics: Iterable[Any]) -> Acceptance:
        """From ``llm.get_metrics()`` of an engine with ``disable_log_stats=False``."""
        samples: list[tuple[str, int | None, int]] = []
        for metric in metrics:
            if not metric.name.startswith(_PREFIX):
                continue
            name = metric.name.removeprefix(_PREFIX)
            if hasattr(metric, "values"):
                samples += [(name, position, value) for position, value in enumerate(metric.values)]
            else:
                samples.append((name, None, metric.value))
        return cls._from_samples(samples)

    @classmethod
    def from_prometheus(cls, text: str) -> Acceptance:
        """From the text of a server's ``/metrics``."""
        samples: list[tuple[str, int | None, int]] = []
        for line in text.splitlines():
            if found := _SAMPLE.match(line):
                name, labels, value = found.groups()
                position = _POSITION.search(labels or "")
                samples.append((name, int(position[1]) if position else None, int(float(value))))
        return cls._from_samples(samples)
