"""An engine (``vllm.LLM``) in a process of its own, measured pass by pass.

The child builds the engine once, says what it is, and then measures one pass for every setting it is sent.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_mtpc.engine.child import Child, started
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.passes import Answer, Measured, Prompt, Setting
from vllm_mtpc.engine.steps import StepClock, is_v2, runner_of, worker_of

WARM_UP_TOKENS = 8


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
        self._child.send(asdict(setting))
        return Measured.from_json(self._child.answer())


@contextlib.contextmanager
def launched(
    engine: dict[str, Any], prompts: Sequence[Prompt], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Resident]:
    """An engine that is starting, as others may at the same time. ``engine``: keyword arguments of ``vllm.LLM``."""
    given = {"prompts": list(prompts)}
    with started(f"{__name__}:passes", engine, log, given, environment=environment) as child:
        yield Resident(child)


def passes(llm: Any, items: Iterator[dict[str, Any]], prompts: list[Prompt]) -> Iterator[dict[str, Any]]:
    """The job: about the engine, then a pass for each setting."""
    runner = runner_of(llm)
    yield {
        "runner": "unknown" if runner is None else "V2" if is_v2(runner) else "V1",
        "kv_cache_bytes": getattr(worker_of(llm), "available_kv_cache_memory_bytes", None),
    }
    clock, asked = StepClock(runner) if runner is not None else None, 0
    for item in items:
        setting = Setting(**item)
        yield asdict(_measure(llm, clock, prompts, setting, asked))
        asked += setting.prompts * (1 + setting.repeats)


def _measure(llm: Any, clock: StepClock | None, prompts: Sequence[Prompt], setting: Setting, asked: int) -> Measured:
    """One setting. The same code times plain and drafted decoding. asked: requests so far, which have their names."""
    chosen = setting.chosen(prompts)
    _answers(llm, chosen[: setting.clients], setting, WARM_UP_TOKENS, asked)
    if clock:
        clock.clear()
    before, seconds, repetitions = Acceptance.from_llm(llm.get_metrics()), [], []
    for repeat in range(setting.repeats):
        started = time.perf_counter()
        first = asked + (1 + repeat) * setting.prompts
        repetitions.append(_answers(llm, chosen, setting, setting.max_tokens, first))
        seconds.append(time.perf_counter() - started)
    acceptance = Acceptance.from_llm(llm.get_metrics()) - before
    return Measured.of(setting, seconds, repetitions, acceptance, clock.read() if clock else None)


def _answers(llm: Any, prompts: Sequence[Prompt], setting: Setting, max_tokens: int, first: int) -> list[Answer]:
    """Answers in the order of the prompts; as soon as one is whole the next prompt takes its place."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    how = SamplingParams(
        temperature=setting.temperature,
        max_tokens=max_tokens,
        ignore_eos=setting.ignore_eos,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine, answers, waiting = llm.llm_engine, {}, list(enumerate(prompts))[::-1]
    while len(answers) < len(prompts):
        while waiting and engine.get_num_unfinished_requests() < setting.clients:
            index, prompt = waiting.pop()
            given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
            engine.add_request(str(first + index), given, how.clone())
        for output in engine.step():
            if output.finished:
                answers[int(output.request_id) - first] = _answer(output)
    return [answers[index] for index in range(len(prompts))]


def _answer(output: Any) -> Answer:
    """By vLLM's own clock of a request."""
    whole, times = output.outputs[0], output.metrics
    later = (times.last_token_ts - times.first_token_ts) / max(1, times.num_generation_tokens - 1)
    return Answer(whole.text, list(whole.token_ids), times.first_token_latency, later)
