"""A job in which vLLM writes responses to prompts, wave by wave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

WAVE, SMALLEST, LARGEST = 64, 16, 4096  # prompts: the first wave, and the bounds of the later ones
WAVE_SECONDS = 30.0  # what an interruption may lose
# A prompt read in chunks takes its generator back by an offset, which generators on a CPU do not have.
# By itself vLLM would ask for nearly all memory, and refuse to start where some of it is in use.
ON_CPU = {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": 1 << 30}


def waves(llm: Any, items: Iterator[dict[str, Any]], sampling: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """The job: answers to {"id", "prompt_ids"}, a list per wave; the first, empty, says that the engine is ready."""
    yield []
    size = WAVE
    while requests := list(islice(items, size)):
        started = time.monotonic()
        yield _answer(llm, requests, sampling)
        seconds = max(time.monotonic() - started, 1e-3)
        size = min(LARGEST, 4 * size, max(SMALLEST, int(size * WAVE_SECONDS / seconds)))


def _answer(llm: Any, requests: list[dict[str, Any]], sampling: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers in any order; one without `response_ids` was skipped: its prompt leaves no room for a token."""
    from vllm import SamplingParams, TokensPrompt

    room = llm.llm_engine.model_config.max_model_len - 1
    fitting = [request for request in requests if len(request["prompt_ids"]) <= room]
    answers: list[dict[str, Any]] = [{"id": it["id"]} for it in requests if len(it["prompt_ids"]) > room]
    prompts = [TokensPrompt(prompt_token_ids=request["prompt_ids"]) for request in fitting]
    how = [SamplingParams(seed=int(request["id"][:8], 16), **sampling) for request in fitting]
    outputs = llm.generate(prompts, how, use_tqdm=False) if fitting else []
    for request, output in zip(fitting, outputs, strict=True):
        answer = output.outputs[0]
        ids = {"id": request["id"], "response_ids": list(answer.token_ids)}
        answers.append({**ids, "finish_reason": answer.finish_reason})
    return answers
