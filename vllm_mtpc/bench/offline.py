"""``LLM.generate`` in a process of its own.

``run`` starts ``python -m vllm_mtpc.bench.offline`` with a job (JSON) and yields each pass as soon as it is measured;
the child builds the engine once and does the job's passes one after the other.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_mtpc.bench.acceptance import Acceptance
from vllm_mtpc.bench.passes import Measured, Setting
from vllm_mtpc.bench.process import engine_child, failure


def run(
    engine: dict[str, Any],
    prompts: Sequence[str],
    settings: Sequence[Setting],
    log: Path,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Measured]:
    """Yields one ``Measured`` per setting. ``engine`` holds the keyword arguments of ``vllm.LLM``."""
    job = {"engine": engine, "prompts": list(prompts), "settings": [asdict(setting) for setting in settings]}
    with engine_child("vllm_mtpc.bench.offline", json.dumps(job), log, environment) as (process, results):
        left = len(settings)
        for line in results:
            yield Measured.from_json(json.loads(line))
            left -= 1
        if left:
            raise failure("the offline engine", process.wait(), log)


def measure(llm: Any, prompts: list[str], setting: Setting) -> Measured:
    """Runs one setting on a built engine. The same code times plain and drafted decoding."""
    from vllm import SamplingParams

    def generate(batch: Sequence[str], max_tokens: int) -> list[Any]:
        how = SamplingParams(temperature=setting.temperature, max_tokens=max_tokens, ignore_eos=True)
        return llm.generate(list(batch), how, use_tqdm=False)

    chosen = prompts[: setting.prompts]
    batches = [chosen[start : start + setting.clients] for start in range(0, len(chosen), setting.clients)]
    generate(batches[0], 16)  # warm-up
    seconds, tokens, answers = [], [], []
    before = Acceptance.from_llm(llm.get_metrics())
    for _ in range(setting.repeats):
        repetition = []
        started = time.perf_counter()
        for batch in batches:
            repetition += generate(batch, setting.max_tokens)
        seconds.append(time.perf_counter() - started)
        tokens.append(sum(len(answer.outputs[0].token_ids) for answer in repetition))
        answers = answers or repetition
    return Measured(
        setting=setting,
        seconds=seconds,
        tokens=tokens,
        outputs=[list(answer.outputs[0].token_ids) for answer in answers],
        texts=[answer.outputs[0].text for answer in answers],
        acceptance=Acceptance.from_llm(llm.get_metrics()) - before,
    )


def main(arguments: Sequence[str]) -> None:
    """The child: ``JOB`` is the job's file, ``FD`` the open file that takes one JSON line per pass."""
    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    from vllm import LLM

    llm = LLM(**{"disable_log_stats": False, **job["engine"]})
    with os.fdopen(int(arguments[1]), "w", encoding="utf-8") as results:
        for setting in job["settings"]:
            print(json.dumps(measure(llm, job["prompts"], Setting(**setting)).to_json()), file=results, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
