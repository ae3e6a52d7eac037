"""Text that vLLM serves with a head, and what it counted: an engine in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vllm_mtpc.engine.child import started
from vllm_mtpc.engine.counters import Acceptance


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

    Raises EngineFailed, with the end of the log, where the engine does not answer.
    """
    asked = [list(pair) for pair in zip(map(list, prompts), seeds or [None] * len(prompts), strict=True)]
    given = {"temperatures": list(temperatures), "sampling": {**(sampling or {}), "max_tokens": max_tokens}}
    with started(f"{__name__}:answers", engine, log, {**given, "alone": alone}, asked) as child:
        found = [child.answer() for _ in range(len(temperatures) * (1 + (alone > 0)))]
    return TypeAdapter(list[Served]).validate_python(found)


def answers(
    llm: Any, items: Iterator[Any], temperatures: list[float], sampling: dict[str, Any], alone: int
) -> Iterator[dict[str, Any]]:
    """The job: (prompt, seed) pairs are answered at each temperature, and the first `alone` once more."""
    from vllm import SamplingParams

    dtype, asked = str(llm.llm_engine.model_config.dtype).removeprefix("torch."), list(items)
    for temperature in temperatures:
        for at_once, some in ((None, asked), (1, asked[:alone])):
            if some:
                prompts = [{"prompt_token_ids": prompt} for prompt, _ in some]
                how = [SamplingParams(**sampling, temperature=temperature, seed=seed) for _, seed in some]
                before, begun, size = Acceptance.from_llm(llm.get_metrics()), time.monotonic(), at_once or len(some)
                found = []
                for start in range(0, len(some), size):
                    part = slice(start, start + size)
                    found += llm.generate(prompts[part], how[part], use_tqdm=False)
                yield {
                    "temperature": temperature,
                    "dtype": dtype,
                    "at_once": at_once,
                    "outputs": [list(one.outputs[0].token_ids) for one in found],
                    "seconds": time.monotonic() - begun,
                    "acceptance": asdict(Acceptance.from_llm(llm.get_metrics()) - before),
                }
