"""Answers of a server that is started for them, with its counters."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.options import serve_arguments
from vllm_mtpc.engine.server import run_server
from vllm_mtpc.engine.target_config import resolve_dtype

# The sampling of a request is its own, without the defaults of the target's generation_config.json.
OWN_SAMPLING = {"generation_config": "vllm"}


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
        engine: arguments of the engine by their names in `vllm.LLM`.
        prompts: token ids.
        temperatures: of sampling.
        max_tokens: of an answer.
        log: file of the server's output.
        sampling: more fields of the requests.
        seeds: of the prompts, which are then separate requests; None: one request without a seed.

    Raises:
        EngineFailed: the server does not start or answer; the message has the end of its log.
    """
    dtype, found = resolve_dtype(engine), []
    with (
        run_server(serve_arguments({**OWN_SAMPLING, **engine}), log) as client,
        ThreadPoolExecutor(len(prompts)) as pool,
    ):
        body = {"model": client.model(), **(sampling or {}), "max_tokens": max_tokens}
        for temperature in temperatures:
            before, how = client.acceptance(), {**body, "temperature": temperature}
            if seeds is None:
                outputs = client.complete({**how, "prompt": list(prompts)})
            else:
                bodies = [{**how, "prompt": [*one], "seed": seed} for one, seed in zip(prompts, seeds, strict=True)]
                outputs = [answer for (answer,) in pool.map(client.complete, bodies)]
            found.append(Served(temperature, outputs, client.acceptance() - before, dtype))
    return found
