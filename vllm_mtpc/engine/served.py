"""Answers of a server with its counters, and passes of `vllm bench serve` in settings that all engines share."""

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

from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.options import flags, read_model_config, serve_arguments
from vllm_mtpc.engine.process import cpu_seconds
from vllm_mtpc.engine.server import Client, run_server
from vllm_mtpc.errors import EngineFailed

# The sampling of a request is its own, without the defaults of the target's generation_config.json.
OWN_SAMPLING = {"generation_config": "vllm"}
WARM_UP_TOKENS = 8
TIMES = ("latencies", "ttfts", "output_lens")  # by request, of `vllm bench serve --save-detailed`

Prompt = str | list[int]  # text, or token ids


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
    """Start a server and generate answers to every prompt at every temperature.

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
    dtype, found = str(read_model_config(engine).dtype).removeprefix("torch."), []
    words = serve_arguments({**OWN_SAMPLING, **engine})
    with run_server(words, log) as client, ThreadPoolExecutor(len(prompts)) as pool:
        for temperature in temperatures:
            before = client.acceptance()
            body = {**(sampling or {}), "max_tokens": max_tokens, "temperature": temperature}
            if seeds is None:
                outputs = client.complete({**body, "prompt": list(prompts)})
            else:
                bodies = [{**body, "prompt": [*one], "seed": seed} for one, seed in zip(prompts, seeds, strict=True)]
                outputs = [answer for (answer,) in pool.map(client.complete, bodies)]
            found.append(Served(temperature, outputs, client.acceptance() - before, dtype))
    return found


@dataclass(frozen=True)
class Setting:
    """How the requests of a pass are sent.

    Attributes:
        clients: requests in flight at once.
        temperature: of sampling; requests have no seeds, so another pass has other samples.
        max_tokens: of every answer.
        prompts: number of requests; the engine's prompts repeat if there are fewer.
        first: index of the first prompt.
    """

    clients: int
    temperature: float
    max_tokens: int
    prompts: int
    first: int = 0

    @property
    def name(self) -> str:
        return f"T={self.temperature:g}, c={self.clients}"


@dataclass(frozen=True)
class Measured:
    """Result of one pass: counts of tokens, medians over requests, seconds of the pass and of its processes."""

    seconds: float
    tokens: int
    acceptance: Acceptance
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


class Engine:
    """A running server and the prompts that its passes choose from."""

    def __init__(self, client: Client, prompts: Sequence[Prompt]) -> None:
        self._client, self._prompts = client, prompts

    def measure(self, setting: Setting) -> Measured:
        """Run one pass.

        Raises:
            EngineFailed: the server did not answer all requests.
        """
        prompts = self._choose(setting.first, setting.prompts)
        self._complete(prompts[: setting.clients], setting.temperature, WARM_UP_TOKENS)
        process = self._client.process or 0
        used, before = cpu_seconds(process), self._client.acceptance()
        result = _bench_serve(self._client.url, setting, prompts)
        if result["completed"] < setting.prompts:
            answered = f"{result['completed']} of {setting.prompts} requests"
            raise EngineFailed(f"vllm serve answered {answered} of {setting.name}")
        times = zip(*(result[key] for key in TIMES), strict=True)
        tpots = [(latency - first) / max(1, tokens - 1) for latency, first, tokens in times]
        return Measured(
            result["duration"],
            result["total_output_tokens"],
            self._client.acceptance() - before,
            round(1000 * median(result["ttfts"]), 3),
            round(1000 * median(tpots), 3),
            cpu_seconds(process) - used,
        )

    def complete_greedy(self, setting: Setting, count: int) -> list[list[int]]:
        """Return greedy answers to the first `count` prompts: the first one alone, then all of them at once."""
        prompts = self._choose(0, count)
        return [tokens for sent in (prompts[:1], prompts) for tokens in self._complete(sent, 0.0, setting.max_tokens)]

    def _choose(self, first: int, count: int) -> list[Prompt]:
        return [self._prompts[index % len(self._prompts)] for index in range(first, first + count)]

    def _complete(self, prompts: Sequence[Prompt], temperature: float, max_tokens: int) -> list[list[int]]:
        how = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True}
        return self._client.complete({"prompt": list(prompts), **how})


def _bench_serve(url: str, setting: Setting, prompts: Sequence[Prompt]) -> dict[str, Any]:
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file, contextlib.redirect_stdout(io.StringIO()):
        file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        file.flush()
        values = {
            "backend": "openai",
            "base_url": url,
            "dataset_name": "custom",
            "dataset_path": file.name,
            "num_prompts": len(prompts),
            "max_concurrency": setting.clients,
            "temperature": setting.temperature,
            # with the answer's length: there is no tokenizer to count with
            "extra_body": {"max_tokens": setting.max_tokens, "ignore_eos": True},
        }
        switches = ("skip_tokenizer_init", "skip_chat_template", "disable_shuffle", "disable_tqdm", "save_detailed")
        result = main(parser.parse_args(flags({**values, **dict.fromkeys(switches, True)})))
    gc.unfreeze()  # vLLM has frozen all objects, and Triton reports those that are left at exit
    return result
