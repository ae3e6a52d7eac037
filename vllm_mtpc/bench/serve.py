"""``vllm serve`` as a context, and a client that streams completions from it.

The client uses Python's own HTTP library: what is timed is the server, and a line of its stream is all there is to
parse.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.passes import Measured, Prompt, Setting
from vllm_mtpc.engine.process import engine_environment, failure, group, tail
from vllm_mtpc.errors import EngineFailed

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Answer:
    """One streamed completion."""

    text: str
    tokens: list[int]
    chunks: int
    first_token_seconds: float
    seconds: float

    @property
    def token_seconds(self) -> float:
        """Time of each token after the first."""
        return (self.seconds - self.first_token_seconds) / max(1, len(self.tokens) - 1)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@dataclass(frozen=True)
class Client:
    """Talks to one server."""

    port: int
    timeout_s: float = 120.0
    process: int | None = None  # id of the server's first process

    def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=timeout_s)) as connection:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", errors="replace")

    def post(self, path: str, body: bytes) -> tuple[int, str]:
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=self.timeout_s)) as connection:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", errors="replace")

    def acceptance(self) -> Acceptance:
        return Acceptance.from_prometheus(self.get("/metrics")[1])

    def model(self) -> str:
        """The name the server answers to."""
        return json.loads(self.get("/v1/models")[1])["data"][0]["id"]

    def complete(self, body: dict[str, Any]) -> Answer:
        """One streamed ``/v1/completions`` request. Token ids are asked for, so that outputs compare exactly."""
        payload = json.dumps({**body, "stream": True, "return_token_ids": True})
        texts: list[str] = []
        tokens: list[int] = []
        started = time.perf_counter()
        first = None
        with contextlib.closing(http.client.HTTPConnection(HOST, self.port, timeout=self.timeout_s)) as connection:
            connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise EngineFailed(f"POST /v1/completions answered {response.status}: {response.read()[:500]!r}")
            for line in response:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise EngineFailed(f"the stream of /v1/completions ended with an error: {event['error']}")
                first = first or time.perf_counter()
                for choice in event["choices"]:
                    texts.append(choice["text"])
                    tokens += choice["token_ids"] or []
        ended = time.perf_counter()
        return Answer("".join(texts), tokens, len(texts), (first or ended) - started, ended - started)


@contextlib.contextmanager
def server(
    arguments: Sequence[str], log: Path, timeout_s: float = 600.0, environment: Mapping[str, str] | None = None
) -> Iterator[Client]:
    """Runs ``vllm serve ARGUMENTS`` on a free port, waits until it is healthy, and ends all of it on leaving.

    ``environment`` is added to that of every engine.
    """
    client = Client(free_port())
    address = ["--host", HOST, "--port", str(client.port)]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *arguments, *address]
    with group(command, log, {**engine_environment(), **(environment or {})}) as process:
        deadline = time.monotonic() + timeout_s
        while True:
            if process.poll() is not None:
                raise failure("vllm serve", process.returncode, log)
            with contextlib.suppress(OSError, http.client.HTTPException):
                if client.get("/health")[0] == 200:
                    break
            if time.monotonic() > deadline:
                raise EngineFailed(f"vllm serve was not healthy after {timeout_s:.0f} s; its log {log}:\n{tail(log)}")
            time.sleep(0.25)
        yield replace(client, process=process.pid)


def measure(client: Client, prompts: Sequence[Prompt], setting: Setting) -> Measured:
    """Sends the prompts with ``setting.clients`` of them in flight. The same code times plain and drafted decoding."""
    model = client.model()

    def request(prompt: Prompt, max_tokens: int) -> Answer:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": setting.temperature,
            "ignore_eos": setting.ignore_eos,
        }
        return client.complete(body)

    chosen = setting.chosen(prompts)
    request(chosen[0], 16)  # warm-up
    before = client.acceptance()
    seconds, tokens, answers, everything = [], [], [], []
    with ThreadPoolExecutor(setting.clients) as clients:
        for _ in range(setting.repeats):
            started = time.perf_counter()
            repetition = list(clients.map(lambda prompt: request(prompt, setting.max_tokens), chosen))
            seconds.append(time.perf_counter() - started)
            tokens.append(sum(len(answer.tokens) for answer in repetition))
            everything += repetition
            answers = answers or repetition
    return Measured(
        setting=setting,
        seconds=seconds,
        tokens=tokens,
        outputs=[answer.tokens for answer in answers],
        texts=[answer.text for answer in answers],
        acceptance=client.acceptance() - before,
        first_token_seconds=round(median(answer.first_token_seconds for answer in everything), 5),
        token_seconds=round(median(answer.token_seconds for answer in everything), 6),
    )
