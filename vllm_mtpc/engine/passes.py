"""Measure a server with `vllm bench serve`, in settings that plain vLLM and heads share.

`vllm bench serve` runs in a process that imports vLLM once and serves every pass. Tokens per step come from the
server's counters, read before and after a pass.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.options import serve_arguments
from vllm_mtpc.engine.process import cpu_seconds, engine_environment
from vllm_mtpc.engine.server import Client, run_server
from vllm_mtpc.errors import EngineFailed

Prompt = str | list[int]  # text, or token ids
WARM_UP_TOKENS = 8
START_S = 1800.0
LOG_CHARACTERS = 4000
TIMES = ("latencies", "ttfts", "output_lens")  # by request, of `vllm bench serve --save-detailed`


@dataclass(frozen=True)
class Setting:
    """How the requests of a pass are sent.

    Attributes:
        name: of the setting in error messages.
        clients: requests in flight at once.
        temperature: of sampling; requests have no seeds, so another pass has other samples.
        max_tokens: of an answer.
        prompts: number of requests; the engine's prompts repeat if there are fewer.
        ignore_eos: whether every answer has `max_tokens` tokens.
        first: index of the first prompt.
    """

    name: str
    clients: int
    temperature: float
    max_tokens: int
    prompts: int
    ignore_eos: bool = True
    first: int = 0


@dataclass(frozen=True)
class Measured:
    """Result of one pass: counts of tokens, medians over requests, seconds of the pass and of its processes."""

    setting: Setting
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
            setting,
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
        body = {"max_tokens": setting.max_tokens, "ignore_eos": setting.ignore_eos}
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
def _load_process() -> tuple[subprocess.Popen[str], IO[str]]:
    """Start the process that runs `vllm bench serve`, and its log; it ends with this process."""
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (open as long as the process)
    command = [sys.executable, "-m", "vllm_mtpc.engine.passes"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, env=engine_environment(), text=True), log


def _run_bench_serve(words: Sequence[str]) -> dict[str, Any]:
    process, log = _load_process()
    assert process.stdin is not None and process.stdout is not None  # pipes
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
    if not (answer := process.stdout.readline()):
        process.wait()
        _load_process.cache_clear()
        log.seek(0)
        raise EngineFailed(f"vllm bench serve ended:\n{log.read()[-LOG_CHARACTERS:]}")
    return json.loads(answer)


@contextlib.contextmanager
def launched(
    engine: Mapping[str, Any], prompts: Sequence[Prompt], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Engine]:
    """Run a server to measure.

    Args:
        engine: arguments of the engine by their names in `vllm.LLM`.
        prompts: that its passes choose from.
        log: file of the server's output.
        environment: added to that of every engine.

    Raises:
        EngineFailed: the server did not start.
    """
    with run_server(serve_arguments(engine), log, START_S, environment) as client:
        yield Engine(client, prompts)


def main() -> None:
    """Run `vllm bench serve` for every line of arguments (JSON) on standard input; print a line of results each."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    results = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        for line in sys.stdin:
            print(json.dumps(bench_serve(parser.parse_args(json.loads(line)))), file=results, flush=True)


if __name__ == "__main__":
    main()
