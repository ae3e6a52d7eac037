"""Text that vLLM serves with a head, and what it counted: an engine in a process of its own.

``serve`` starts this module as a process, with a job (JSON); the child builds the engine once and answers all
prompts, given as token ids, at each temperature.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.process import engine_child, failure


@dataclass(frozen=True)
class Served:
    """One temperature: the answers, one list of token ids per prompt, and the engine's counters over them."""

    temperature: float
    outputs: list[list[int]]
    acceptance: Acceptance
    dtype: str  # the target computed in, e.g. "bfloat16"
    seconds: float = 0.0  # until all prompts were answered
    at_once: int | None = None  # requests at a time; None: all

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / max(self.seconds, 1e-9)


def serve(
    engine: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_tokens: int,
    log: Path,
    sampling: dict[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
    alone: int = 0,
) -> list[Served]:
    """Serves every prompt at every temperature. ``engine``: keyword arguments of ``vllm.LLM``.

    ``alone``: so many prompts are asked once more, one after the other: further answers, with ``at_once`` 1.

    ``sampling``: more of ``vllm.SamplingParams``; ``seeds``: one for each prompt (None: no seeds).

    Raises bench.process.EngineFailed, with the end of the log, where the engine does not answer.
    """
    job = {
        "engine": engine,
        "prompts": [list(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "temperatures": list(temperatures),
        "sampling": sampling or {},
        "seeds": list(seeds or [None] * len(prompts)),
        "alone": alone,
    }
    with engine_child("vllm_mtpc.engine.served", json.dumps(job), log) as (process, results):
        answers = [json.loads(line) for line in results]
        if len(answers) < len(temperatures) * (1 + (alone > 0)):
            raise failure("the engine", process.wait(), log)
    return [_served(answer) for answer in answers]


def _served(answer: dict[str, Any]) -> Served:
    return Served(acceptance=Acceptance.from_json(answer.pop("acceptance")), **answer)


def main(arguments: Sequence[str]) -> None:
    """The child: ``JOB`` is the job's file, ``FD`` the open file that takes one JSON line per temperature."""
    from vllm import LLM, SamplingParams

    job = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    llm = LLM(**{"disable_log_stats": False, **job["engine"]})
    dtype = str(llm.llm_engine.model_config.dtype).removeprefix("torch.")
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    with os.fdopen(int(arguments[1]), "w", encoding="utf-8") as results:
        for temperature in job["temperatures"]:
            more = {**job["sampling"], "temperature": temperature, "max_tokens": job["max_tokens"]}
            how = [SamplingParams(**more, seed=seed) for seed in job["seeds"]]
            asked = list(zip(prompts, how, strict=True))
            for at_once, some in ((None, asked), (1, asked[: job["alone"]])):
                if some:
                    answer = {"temperature": temperature, "dtype": dtype, "at_once": at_once}
                    print(json.dumps({**answer, **_answers(llm, some, at_once)}), file=results, flush=True)


def _answers(llm: Any, asked: list[tuple[Any, Any]], at_once: int | None) -> dict[str, Any]:
    """Outputs of (prompt, sampling parameters), at_once of them at a time, and what was counted meanwhile."""
    before, started, outputs = Acceptance.from_llm(llm.get_metrics()), time.monotonic(), []
    for start in range(0, len(asked), at_once or len(asked)):
        prompts, how = zip(*asked[start : start + (at_once or len(asked))], strict=True)
        outputs += [list(one.outputs[0].token_ids) for one in llm.generate(list(prompts), list(how), use_tqdm=False)]
    seconds = time.monotonic() - started
    counted = asdict(Acceptance.from_llm(llm.get_metrics()) - before)
    return {"outputs": outputs, "acceptance": counted, "seconds": seconds}


if __name__ == "__main__":
    main(sys.argv[1:])
