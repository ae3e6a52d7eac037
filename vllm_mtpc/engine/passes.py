"""One measured pass: some prompts, one setting, its outputs and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.steps import Steps

Prompt = str | list[int]  # text, or token ids


@dataclass(frozen=True)
class Setting:
    """How prompts are sent. ``clients`` = how many are in flight at once; 1 sends them one after the other.

    Requests carry no seed of their own: repetitions of a sampled pass are new samples, from the engine's seed.
    """

    name: str
    clients: int
    temperature: float
    max_tokens: int
    prompts: int  # how many of the job's prompts; they begin again where there are not so many
    repeats: int = 1  # timed repetitions; the median counts
    ignore_eos: bool = True  # answers of the same length, whatever the text
    first: int = 0  # which of the job's prompts is the first

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def chosen(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts of this pass."""
        return [prompts[(self.first + index) % len(prompts)] for index in range(self.prompts)]


@dataclass(frozen=True)
class Answer:
    """One request's."""

    text: str
    tokens: list[int]
    first_token_seconds: float
    token_seconds: float  # of each token after the first


@dataclass(frozen=True)
class Measured:
    """What a pass gave. ``outputs`` are the token ids of the first repetition, one list per prompt."""

    setting: Setting
    seconds: list[float]  # one per repetition
    tokens: list[int]  # generated tokens, one per repetition
    outputs: list[list[int]]
    texts: list[str]
    acceptance: Acceptance = field(default_factory=Acceptance)
    first_token_seconds: float | None = None  # median time to the first token
    token_seconds: float | None = None  # median time of each later token (TPOT)
    steps: Steps | None = None  # where the engine's steps could be timed

    @property
    def tokens_per_second(self) -> float:
        return median(count / seconds for count, seconds in zip(self.tokens, self.seconds, strict=True))

    @property
    def tokens_per_step(self) -> float:
        """Over all decoding steps where they were counted, those without drafts included; else those with drafts."""
        if self.steps is None:
            return self.acceptance.tokens_per_step
        return 1.0 + self.acceptance.accepted_tokens / self.steps.request_steps

    def identical(self, other: Measured) -> int:
        """How many prompts got the very same tokens as in ``other``."""
        return sum(mine == theirs for mine, theirs in zip(self.outputs, other.outputs, strict=True))

    @classmethod
    def of(
        cls,
        setting: Setting,
        seconds: list[float],
        repetitions: Sequence[Sequence[Answer]],
        acceptance: Acceptance,
        steps: Steps | None = None,
    ) -> Measured:
        answers = list(chain.from_iterable(repetitions))
        return cls(
            setting=setting,
            seconds=seconds,
            tokens=[sum(len(answer.tokens) for answer in repetition) for repetition in repetitions],
            outputs=[answer.tokens for answer in repetitions[0]],
            texts=[answer.text for answer in repetitions[0]],
            acceptance=acceptance,
            first_token_seconds=round(median(answer.first_token_seconds for answer in answers), 5),
            token_seconds=round(median(answer.token_seconds for answer in answers), 6),
            steps=steps,
        )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        """From `dataclasses.asdict` through JSON."""
        return TypeAdapter(cls).validate_python(data)
