"""Measure a server with `vllm bench serve`, in settings that plain vLLM and heads share.

Tokens per step come from the server's counters, read before and after a pass.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.options import serve_arguments
from vllm_mtpc.engine.process import cpu_seconds
from vllm_mtpc.engine.server import Client, run_server
from vllm_mtpc.errors import EngineFailed

Prompt = str | list[int]  # text, or token ids
WARM_UP_TOKENS = 8
TIMES = ("latencies", "ttfts", "output_lens")  # by request, of `vllm bench serve --save-detailed`


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

    @property
    def tokens_per_step(self) -> float:
        return self.acceptance.tokens_per_step


class Engine:
    """A running server and the prompts that its passes choose from."""

    def __init__(self, client: Client, prompts: Sequence[Prompt]) -> None:
        self.client, self._prompts = client, prompts
        self._model = client.model()

    def measure(self, setting: Setting) -> Measured:
        """Run one pass.

        Raises:
            EngineFailed: the server did not answer all requests.
        """
        chosen = [self._prompts[(setting.first + index) % len(self._prompts)] for index in range(setting.prompts)]
        self.complete(chosen[: setting.clients], setting.temperature, WARM_UP_TOKENS)
        process = self.client.process or 0
        used, before = cpu_seconds(process), self.client.acceptance()
        result = self._send(setting, chosen)
        if result["completed"] < setting.prompts:
            answered = f"{result['completed']} of {setting.prompts} requests"
            raise EngineFailed(f"vllm serve answered {answered} of {setting.name}")
        return Measured(
            result["duration"],
            result["total_output_tokens"],
            self.client.acceptance() - before,
            round(1000 * median(result["ttfts"]), 3),
            round(1000 * median(map(_seconds_per_token, *(result[key] for key in TIMES))), 3),
            cpu_seconds(process) - used,
        )

    def complete(self, prompts: Sequence[Prompt], temperature: float, max_tokens: int) -> list[list[int]]:
        """Return the token ids of answers to prompts that are sent in one request."""
        how = {"temperature": temperature, "max_tokens": max_tokens, "ignore_eos": True}
        return self.client.complete({"model": self._model, "prompt": list(prompts), **how})

    def complete_greedy(self, setting: Setting, count: int) -> list[list[int]]:
        """Return greedy answers to the first `count` prompts: the first one alone, then all of them at once."""
        prompts = [self._prompts[index % len(self._prompts)] for index in range(count)]
        return [tokens for sent in (prompts[:1], prompts) for tokens in self.complete(sent, 0.0, setting.max_tokens)]

    def _send(self, setting: Setting, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Return the result of `vllm bench serve` for these prompts."""
        body = {"max_tokens": setting.max_tokens, "ignore_eos": True}
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            file.writelines(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
            file.flush()
            values = {
                "backend": "openai",
                "base-url": self.client.url,
                "model": self._model,
                "dataset-name": "custom",
                "dataset-path": file.name,
                "num-prompts": len(prompts),
                "max-concurrency": setting.clients,
                "temperature": setting.temperature,
                "extra-body": json.dumps(body),  # with the answer's length: there is no tokenizer to count with
            }
            words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
            words += ["--skip-tokenizer-init", "--skip-chat-template", "--disable-shuffle", "--disable-tqdm"]
            return _run_bench_serve([*words, "--save-detailed"])


def _seconds_per_token(latency: float, first: float, tokens: int) -> float:
    return (latency - first) / max(1, tokens - 1)


@functools.cache
def _bench_serve_parser() -> argparse.ArgumentParser:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    return parser


def _run_bench_serve(words: Sequence[str]) -> dict[str, Any]:
    from vllm.benchmarks.serve import main

    with contextlib.redirect_stdout(io.StringIO()):  # the report of every pass
        result = main(_bench_serve_parser().parse_args(words))
    gc.unfreeze()  # vLLM has frozen all objects, and Triton reports those that are left at exit
    return result


@contextlib.contextmanager
def launched(engine: Mapping[str, Any], prompts: Sequence[Prompt], log: Path) -> Iterator[Engine]:
    """Run a server to measure.

    Args:
        engine: arguments of the engine by their names in `vllm.LLM`.
        prompts: that its passes choose from.
        log: file of the server's output.

    Raises:
        EngineFailed: the server did not start.
    """
    with run_server(serve_arguments(engine), log) as client:
        yield Engine(client, prompts)
