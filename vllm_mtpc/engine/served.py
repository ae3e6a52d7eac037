"""Text that vLLM writes in a process of its own: served with a head, and what it counted; or prompts, wave by wave."""

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
WAVE_SECONDS = 30.0  # what an interruption may lose
# A prompt read in chunks takes its generator back by an offset, which generators on a CPU do not have.
# By itself vLLM would ask for nearly all memory, and refuse to start where some of it is in use.
ON_CPU = {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": 1 << 30}


@dataclass(frozen=True)
class Served:
    """One temperature: the answers, one list of token ids per prompt, and the engine's counters over them."""

    temperature: float
    outputs: list[list[int]]
    acceptance: Acceptance
    dtype: str  # the target computed in, e.g. "bfloat16"


def serve(
    engine: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_tokens: int,
    log: Path,
    sampling: dict[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Served]:
    """Serves every prompt at every temperature. ``engine``: keyword arguments of ``vllm.LLM``.

    ``sampling``: more of ``vllm.SamplingParams``; ``seeds``: one for each prompt (None: no seeds).

    Raises EngineFailed, with the end of the log, where the engine does not answer.
    """
    asked = zip(prompts, [None] * len(prompts) if seeds is None else seeds, strict=True)
    given = {"temperatures": temperatures, "sampling": {**(sampling or {}), "max_tokens": max_tokens}}
    with started(answers, engine, log, given, asked) as child:
        return [child.answer(Served) for _ in temperatures]


def answers(llm: Any, items: Iterator[Any], temperatures: list[float], sampling: dict[str, Any]) -> Iterator[Served]:
    """The job of `serve`: (prompt, seed) pairs are answered at each temperature."""
    dtype, asked = str(llm.llm_engine.model_config.dtype).removeprefix("torch."), list(items)
    for temperature in temperatures:
        before = Acceptance.read()
        outputs = _generate(llm, asked, {**sampling, "temperature": temperature})
        yield Served(temperature, [list(one.token_ids) for one in outputs], Acceptance.read() - before, dtype)


def waves(llm: Any, items: Iterator[dict[str, Any]], sampling: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """A job: answers to {"id", "prompt_ids"}, a list per wave; the first, empty, says that the engine is ready.

    Answers are in any order; one without `response_ids` was skipped: its prompt leaves no room for a token.
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
    """vLLM's outputs to (prompt, seed) pairs."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt, _ in asked]
    how = [SamplingParams(**sampling, seed=seed) for _, seed in asked]
    outputs = llm.generate(prompts, how, use_tqdm=False) if asked else []
    return [output.outputs[0] for output in outputs]
