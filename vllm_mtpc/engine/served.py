"""Generate text with `vllm.LLM` in a child process: answers with their counters, or responses in waves."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_mtpc.engine.child import started
from vllm_mtpc.engine.counters import Acceptance

WAVE, SMALLEST, LARGEST = 64, 16, 4096  # prompts: the first wave, and the bounds of the later ones
WAVE_SECONDS = 30.0  # of work that an interruption loses
# Chunked prefill sets a generator's offset, which generators on a CPU do not have. By default vLLM reserves nearly all
# memory, and does not start if other processes use some of it.
ON_CPU = {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": 1 << 30}


@dataclass(frozen=True)
class Served:
    """Answers at one temperature: token ids by prompt, and the engine's counters."""

    temperature: float
    outputs: list[list[int]]
    acceptance: Acceptance
    dtype: str  # of the target, e.g. "bfloat16"


def serve(
    engine: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_tokens: int,
    log: Path,
    sampling: dict[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Served]:
    """Generate answers to every prompt at every temperature.

    Args:
        engine: keyword arguments of `vllm.LLM`.
        prompts: token ids.
        temperatures: of sampling.
        max_tokens: of an answer.
        log: file of the engine's output.
        sampling: more of `vllm.SamplingParams`.
        seeds: of the prompts; None: no seeds.

    Raises:
        EngineFailed: the engine does not answer; the message has the end of its log.
    """
    asked = zip(prompts, [None] * len(prompts) if seeds is None else seeds, strict=True)
    given = {"temperatures": temperatures, "sampling": {**(sampling or {}), "max_tokens": max_tokens}}
    with started(answers, engine, log, given, asked) as child:
        return [child.answer(Served) for _ in temperatures]


def answers(llm: Any, items: Iterator[Any], temperatures: list[float], sampling: dict[str, Any]) -> Iterator[Served]:
    """Answer (prompt, seed) pairs at each temperature: the job of `serve`."""
    dtype, asked = str(llm.llm_engine.model_config.dtype).removeprefix("torch."), list(items)
    for temperature in temperatures:
        before = Acceptance.read()
        outputs = _generate(llm, asked, {**sampling, "temperature": temperature})
        yield Served(temperature, [list(one.token_ids) for one in outputs], Acceptance.read() - before, dtype)


def waves(llm: Any, items: Iterator[dict[str, Any]], sampling: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Answer items {"id", "prompt_ids"}: a job that yields a list per wave, the first empty when the engine is ready.

    An answer without `response_ids` was skipped: its prompt leaves no room for a token.
    """
    yield []
    room, size = llm.llm_engine.model_config.max_model_len - 1, WAVE
    while requests := list(islice(items, size)):
        begun = time.monotonic()
        fitting = [one for one in requests if len(one["prompt_ids"]) <= room]
        found = [{"id": one["id"]} for one in requests if len(one["prompt_ids"]) > room]
        outputs = _generate(llm, [(one["prompt_ids"], int(one["id"][:8], 16)) for one in fitting], sampling)
        for one, output in zip(fitting, outputs, strict=True):
            ids = {"id": one["id"], "response_ids": list(output.token_ids)}
            found.append({**ids, "finish_reason": output.finish_reason})
        yield found
        seconds = max(time.monotonic() - begun, 1e-3)
        size = min(LARGEST, 4 * size, max(SMALLEST, int(size * WAVE_SECONDS / seconds)))


def _generate(llm: Any, asked: Sequence[Any], sampling: dict[str, Any]) -> list[Any]:
    """Return vLLM's outputs for (prompt, seed) pairs."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    how = [SamplingParams(**sampling, seed=seed) for _, seed in asked]
    outputs = llm.generate(prompts, how, use_tqdm=False) if asked else []
    return [output.outputs[0] for output in outputs]
