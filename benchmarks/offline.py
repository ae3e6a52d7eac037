"""Measured passes: some prompts, one setting, its outputs and its results; by an engine in a process of its own.

The child builds the engine once, says what it is, and then measures one pass for every setting it is sent.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine_child import Child, started
from benchmarks.step_clock import StepClock, Steps, is_v2, runner_of, worker_of
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.process import cpu_seconds

Prompt = str | list[int]  # text, or token ids
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Setting:
    """How prompts are sent. ``clients`` = how many are in flight at once; 1 sends them one after the other.

    Requests carry no seed of their own: a sampled pass that comes again has new samples, from the engine's seed.
    """

    name: str
    clients: int
    temperature: float
    max_tokens: int
    prompts: int  # number of the job's prompts; they repeat where there are fewer
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
    """What a pass gave."""

    setting: Setting
    seconds: float
    answers: list[Answer]  # one per prompt
    acceptance: Acceptance
    steps: Steps | None = None  # where the engine's steps could be timed
    cpu_seconds: float = 0.0  # of the engine's processes

    @property
    def outputs(self) -> list[list[int]]:
        return [answer.tokens for answer in self.answers]

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(map(len, self.outputs))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        """Over all decoding steps where they were counted, those without drafts included; else those with drafts."""
        if self.steps is None:
            return self.acceptance.tokens_per_step
        return 1.0 + self.acceptance.accepted_tokens / self.steps.request_steps

    @property
    def first_token_seconds(self) -> float:
        """Median time to the first token."""
        return round(median(answer.first_token_seconds for answer in self.answers), 5)

    @property
    def token_seconds(self) -> float:
        """Median time of each later token (TPOT)."""
        return round(median(answer.token_seconds for answer in self.answers), 6)

    def identical(self, other: Measured) -> int:
        """How many prompts got the very same tokens as in ``other``."""
        return sum(mine == theirs for mine, theirs in zip(self.outputs, other.outputs, strict=True))


class Resident:
    """An engine that waits for settings."""

    def __init__(self, child: Child) -> None:
        self._child = child

    @cached_property
    def about(self) -> dict[str, Any]:
        """What the engine says when it is ready, which is waited for.

        ``runner``: the model runner it uses (V1 or V2); ``kv_cache_bytes``: on a GPU, what is left for its KV cache.
        """
        return self._child.answer()

    def measure(self, setting: Setting) -> Measured:
        """One pass. Raises EngineFailed, with the end of the log, where the engine has ended."""
        _ = self.about  # comes before any pass
        self._child.send(setting)
        return self._child.answer(Measured)


@contextlib.contextmanager
def launched(
    engine: dict[str, Any], prompts: Sequence[Prompt], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Resident]:
    """An engine that is starting, as others may at the same time. ``engine``: keyword arguments of ``vllm.LLM``."""
    given = {"prompts": list(prompts)}
    with started(passes, engine, log, given, environment=environment) as child:
        yield Resident(child)


def passes(llm: Any, items: Iterator[dict[str, Any]], prompts: list[Prompt]) -> Iterator[dict[str, Any] | Measured]:
    """The job of `launched`: about the engine, then a pass for each setting. The same code times plain and drafted."""
    runner = runner_of(llm)
    yield {
        "runner": "unknown" if runner is None else "V2" if is_v2(runner) else "V1",
        "kv_cache_bytes": getattr(worker_of(llm), "available_kv_cache_memory_bytes", None),
    }
    clock, asked = StepClock(runner) if runner is not None else None, 0
    for item in items:
        setting = Setting(**item)
        chosen = setting.chosen(prompts)
        _answers(llm, chosen[: setting.clients], setting, WARM_UP_TOKENS, asked)
        if clock:
            clock.records.clear()
        used, before, begun = cpu_seconds(os.getpid()), _counters(), time.perf_counter()
        answers = _answers(llm, chosen, setting, setting.max_tokens, asked + setting.prompts)
        seconds, counted = time.perf_counter() - begun, _counters() - before
        used = cpu_seconds(os.getpid()) - used
        yield Measured(setting, seconds, answers, counted, clock.read() if clock else None, used)
        asked += 2 * setting.prompts  # requests so far, which have their names


def _counters() -> Acceptance:
    from prometheus_client import generate_latest

    return Acceptance.read(generate_latest().decode())


def _answers(llm: Any, prompts: Sequence[Prompt], setting: Setting, max_tokens: int, first: int) -> list[Answer]:
    """Answers in the order of the prompts, by vLLM's clock; as soon as one is whole the next prompt takes its place."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    how = SamplingParams(
        temperature=setting.temperature,
        max_tokens=max_tokens,
        ignore_eos=setting.ignore_eos,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine, waiting = llm.llm_engine, list(enumerate(prompts))[::-1]
    answers: dict[int, Answer] = {}
    while len(answers) < len(prompts):
        while waiting and engine.get_num_unfinished_requests() < setting.clients:
            index, prompt = waiting.pop()
            given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
            engine.add_request(str(first + index), given, how.clone())
        for output in engine.step():
            if output.finished:
                whole, times = output.outputs[0], output.metrics
                later = (times.last_token_ts - times.first_token_ts) / max(1, times.num_generation_tokens - 1)
                answer = Answer(whole.text, list(whole.token_ids), times.first_token_latency, later)
                answers[int(output.request_id) - first] = answer
    return [answers[index] for index in range(len(prompts))]
