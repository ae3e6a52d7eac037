"""The process in which vLLM writes responses: `python -m vllm_mtpc.batch.regenerate_engine JOB FD`.

JOB is a file: one JSON line with the arguments of `vllm.LLM` and of `SamplingParams`, then a line per prompt. FD is an
open file that takes one JSON line per wave, a list of answers; the first, empty, says that the engine is ready.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any

WAVE, SMALLEST, LARGEST = 64, 16, 4096  # prompts: the first wave, and the bounds of the later ones
WAVE_SECONDS = 30.0  # what an interruption may lose
CPU_CACHE_BYTES = 1 << 30


def main(arguments: Sequence[str]) -> None:
    with open(arguments[0], encoding="utf-8") as job, os.fdopen(int(arguments[1]), "w", encoding="utf-8") as results:
        settings = json.loads(next(job))
        llm = _build(settings["engine"])
        print("[]", file=results, flush=True)
        size = WAVE
        while lines := list(islice(job, size)):
            started = time.monotonic()
            answers = _answer(llm, [json.loads(line) for line in lines], settings["sampling"])
            print(json.dumps(answers), file=results, flush=True)
            seconds = max(time.monotonic() - started, 1e-3)
            size = min(LARGEST, 4 * size, max(SMALLEST, int(size * WAVE_SECONDS / seconds)))


def _build(engine: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        # A prompt read in chunks takes its generator back by an offset, which generators on a CPU do not have.
        # By itself vLLM would ask for nearly all memory, and refuse to start where some of it is in use.
        calm = {"enforce_eager": True, "enable_chunked_prefill": False, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
        engine = {**calm, **engine}
    return LLM(**engine)


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


if __name__ == "__main__":
    main(sys.argv[1:])
