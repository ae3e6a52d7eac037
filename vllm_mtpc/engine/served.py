"""Answers of a server with its counters, and passes of `vllm bench serve` under a load that all engines share."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from vllm_mtpc.engine.process import cpu_seconds
from vllm_mtpc.engine.server import Acceptance, VllmServer, flags, run_server, serve_arguments
from vllm_mtpc.errors import EngineFailed

# The sampling of a request is its own, without the defaults of the target's generation_config.json.
OWN_SAMPLING = {"generation_config": "vllm"}
WARM_UP_TOKENS = 8

Prompt = str | list[int]  # text, or token ids


@dataclass(frozen=True)
class Served:
    """Answers at one temperature: token ids by prompt, and the engine's counters."""

    temperature: float
    outputs: list[list[int]]
    acceptance: Acceptance
    dtype: str  # of the target, e.g. "bfloat16"


@dataclass(frozen=True)
class Load:
    """How the requests of a pass are sent. They have no seeds, so another pass has other samples."""

    clients: int  # requests in flight at once
    temperature: float
    max_tokens: int  # of every answer
    prompts: int  # number of requests

    @property
    def name(self) -> str:
        return f"T={self.temperature:g}, c={self.clients}"


@dataclass(frozen=True)
class PassResult:
    """Result of one pass: its seconds, tokens and counters, medians over requests, CPU seconds of the server."""

    seconds: float
    tokens: int
    acceptance: Acceptance
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def serve(
    engine: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    max_tokens: int,
    log: Path | None,
    sampling: dict[str, Any] | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Served]:
    """Start a server (`engine`: arguments of `vllm.LLM`) and generate answers to every prompt at every temperature.

    `sampling`: more fields of the requests. Raises EngineFailed, with the end of the log, if it does not answer.
    """
    from vllm.engine.arg_utils import EngineArgs

    found, words = [], serve_arguments({**OWN_SAMPLING, **engine})
    with run_server(words, log) as client, ThreadPoolExecutor(len(prompts)) as pool:
        config = EngineArgs(**{**engine, "speculative_config": None}).create_model_config()
        for temperature in temperatures:
            before = client.acceptance()
            body = {**(sampling or {}), "max_tokens": max_tokens, "temperature": temperature}
            numbers: Sequence[int | None] = seeds or [None] * len(prompts)
            numbered = zip(prompts, numbers, strict=True)
            bodies = [{**body, "prompt": [*prompt], "seed": seed} for prompt, seed in numbered]
            outputs = [answer for (answer,) in pool.map(client.complete, bodies)]
            found.append(Served(temperature, outputs, client.acceptance() - before, str(config.dtype)[6:]))
    return found


def measure(client: VllmServer, load: Load, prompts: Sequence[Prompt]) -> PassResult:
    """Warm up and run one pass of `vllm bench serve` over the prompts. Raises EngineFailed for unanswered requests.

    vLLM reports no times without a tokenizer, and its acceptance length is a mean over steps with drafts alone.
    """
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    _complete(client, prompts[: load.clients], load.temperature, WARM_UP_TOKENS)
    used, before = cpu_seconds(client.process.pid), client.acceptance()
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file, contextlib.redirect_stdout(io.StringIO()):
        file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        file.flush()
        values = {
            "backend": "openai",
            "base_url": client.url,
            "dataset_name": "custom",
            "dataset_path": file.name,
            "num_prompts": len(prompts),
            "max_concurrency": load.clients,
            "temperature": load.temperature,
            # with the answer's length: there is no tokenizer to count with
            "extra_body": {"max_tokens": load.max_tokens, "ignore_eos": True},
        }
        switches = ("skip_tokenizer_init", "skip_chat_template", "disable_shuffle", "disable_tqdm", "save_detailed")
        result = main(parser.parse_args(flags({**values, **dict.fromkeys(switches, True)})))
    gc.unfreeze()  # vLLM has frozen all objects, and Triton reports those that are left at exit
    if result["completed"] < len(prompts):
        answered = f"{result['completed']} of {len(prompts)} requests"
        error = next(filter(None, result["errors"]), "no error").strip().rpartition("\n")[2]
        raise EngineFailed(f"vllm serve answered {answered} of {load.name}: {error}")
    times = zip(result["latencies"], result["ttfts"], result["output_lens"], strict=True)
    tpots = [(latency - first) / max(1, tokens - 1) for latency, first, tokens in times]
    return PassResult(
        result["duration"],
        result["total_output_tokens"],
        client.acceptance() - before,
        round(1000 * median(result["ttfts"]), 3),
        round(1000 * median(tpots), 3),
        cpu_seconds(client.process.pid) - used,
    )


def complete_greedy(client: VllmServer, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
    """Return greedy answers: to the first prompt alone, then to all prompts at once."""
    return [tokens for sent in (prompts[:1], prompts) for tokens in _complete(client, sent, 0.0, max_tokens)]


def _complete(client: VllmServer, prompts: Sequence[Prompt], temperature: float, max_tokens: int) -> list[list[int]]:
    how = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True}
    return client.complete({"prompt": list(prompts), **how})
