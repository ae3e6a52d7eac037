"""``vllm serve`` as a context, and a client that streams completions from it.

The client uses Python's own HTTP library: what is timed is the server, and a line of its stream is all there is to
parse.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.passes import Answer, Measured, Prompt, Setting
from vllm_mtpc.engine.process import cpu_seconds, engine_environment
from vllm_mtpc.engine.server import PROGRAM, ServerProcess
from vllm_mtpc.errors import EngineFailed

HOST = "127.0.0.1"


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

    @contextlib.contextmanager
    def ask(
        self, method: str, path: str, body: bytes | str | None = None, timeout_s: float | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout_s or self.timeout_s)
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Content-Type": "application/json"})
            yield connection.getresponse()

    def get(self, path: str, timeout_s: float = 5.0) -> tuple[int, str]:
        with self.ask("GET", path, timeout_s=timeout_s) as response:
            return response.status, response.read().decode("utf-8", errors="replace")

    def post(self, path: str, body: bytes) -> tuple[int, str]:
        with self.ask("POST", path, body) as response:
            return response.status, response.read().decode("utf-8", errors="replace")

    def is_healthy(self) -> bool:
        try:
            return self.get("/health")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def acceptance(self) -> Acceptance:
        return Acceptance.read(self.get("/metrics", timeout_s=30)[1])

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
        with self.ask("POST", "/v1/completions", payload) as response:
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
        first = first or ended
        return Answer("".join(texts), tokens, first - started, (ended - first) / max(1, len(tokens) - 1))


@contextlib.contextmanager
def server(
    arguments: Sequence[str], log: Path, timeout_s: float = 600.0, environment: Mapping[str, str] | None = None
) -> Iterator[Client]:
    """Runs ``vllm serve ARGUMENTS`` on a free port, waits until it is healthy, and ends all of it on leaving.

    ``environment`` is added to that of every engine.
    """
    client = Client(free_port())
    command = [*PROGRAM, *arguments, "--host", HOST, "--port", str(client.port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        process = ServerProcess(command, {**engine_environment(), **(environment or {})}, output)
        try:
            deadline = time.monotonic() + timeout_s
            while not client.is_healthy():
                process.check_running()
                if time.monotonic() > deadline:
                    raise process.failed(f"was not healthy after {timeout_s:.0f} s")
                time.sleep(0.25)
            yield replace(client, process=process.pid)
        finally:
            process.stop()


class Served:
    """A server that answers prompts, measured pass by pass as an engine offline is."""

    def __init__(self, client: Client, prompts: Sequence[Prompt]) -> None:
        self.client, self.prompts = client, prompts
        self.about: dict[str, Any] = {"runner": "vllm serve"}

    def measure(self, setting: Setting) -> Measured:
        """One pass, ``setting.clients`` requests in flight. The same code times plain and drafted decoding."""
        model = self.client.model()
        how = {"model": model, "temperature": setting.temperature, "ignore_eos": setting.ignore_eos}

        def request(prompt: Prompt, max_tokens: int = setting.max_tokens) -> Answer:
            return self.client.complete({**how, "prompt": prompt, "max_tokens": max_tokens})

        chosen = setting.chosen(self.prompts)
        request(chosen[0], 16)  # warm-up
        process = self.client.process or 0
        used, before, started = cpu_seconds(process), self.client.acceptance(), time.perf_counter()
        with ThreadPoolExecutor(setting.clients) as clients:
            answers = list(clients.map(request, chosen))
        seconds = time.perf_counter() - started
        used = cpu_seconds(process) - used
        return Measured(setting, seconds, answers, self.client.acceptance() - before, cpu_seconds=used)
