"""Run `vllm serve` as a child process that never outlives its parent, and send it requests.

Every command that serves goes through `VllmServer`. Recorded states use a Unix socket, which no other
user can reach; a browser and `vllm bench serve` need a port.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.options import API_KEY
from vllm_mtpc.engine.process import engine_environment
from vllm_mtpc.errors import EngineFailed

PROGRAM = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
HOST = "127.0.0.1"
LOG_LINES = 25  # of the server's output in an error message
HEALTH_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 86400.0  # of a whole answer: all tokens of all prompts of a request
# A connection for each blocking request: vLLM closes those that are idle, and a request must not meet that.
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return probe.getsockname()[1]


class VllmServer:
    """One `vllm serve ARGUMENTS` in a child process, and blocking requests to it from any number of threads.

    Args:
        arguments: words after `vllm serve`.
        environment: variables added to those of this process.
        program: the command in place of `vllm serve`, for tests.
        log: file that the server's output is appended to; None: a temporary one. Error messages have its last lines.
        port: local port to listen on; None: a Unix socket.
    """

    process: subprocess.Popen[bytes]

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PROGRAM,
        log: Path | None = None,
        port: int | None = None,
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="vllm_mtpc-")  # short: a socket's path has at most 107 characters
        path = str(Path(self._folder, "http")) if port is None else None
        where = ["--host", HOST, "--port", str(port)] if path is None else ["--uds", path]
        self.url = f"http://{HOST}:{port}" if path is None else "http://localhost"
        transport = httpx.HTTPTransport(uds=path, limits=CONNECTIONS, verify=False)
        self._http = httpx.Client(transport=transport, trust_env=False)
        self._command = [sys.executable, "-m", "vllm_mtpc.engine.process", *program, *arguments, *where]
        self._environment = {**os.environ, **(environment or {})}
        self._log = log or Path(self._folder, "log")

    def start(self, timeout_s: float = 1800.0) -> None:
        """Start the server and wait until it is healthy.

        Raises:
            EngineFailed: it ended, or was not healthy in time; it is stopped, and the message has its last lines.
        """
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout_s
        try:
            while not self.is_healthy():
                self.check_running()
                if time.monotonic() > deadline:
                    raise self._failure(f"was not healthy after {timeout_s:.0f} s")
                time.sleep(0.25)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and everything that it started."""
        assert self.process.stdin is not None  # a pipe
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # the watcher then ends the server
        self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def check_running(self) -> None:
        """Raise EngineFailed with the last lines of the output if the server has ended."""
        if self.process.poll() is not None:
            raise self._failure(f"ended with exit code {self.process.returncode}")

    def send(self, path: str, body: Any = None, timeout_s: float = ANSWER_TIMEOUT_S) -> httpx.Response:
        """Return the answer to a GET, or to a POST of a JSON body. Raises EngineFailed if there is none."""
        method = "GET" if body is None else "POST"
        sent: dict[str, Any] = {}
        if body is not None:
            sent = {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}
        try:
            return self._http.request(method, self.url + path, timeout=timeout_s, **sent)
        except httpx.RequestError as error:
            raise EngineFailed(f"{method} {path} is not answered: {error!r}") from None

    def is_healthy(self) -> bool:
        try:
            return self.send("/health", timeout_s=HEALTH_TIMEOUT_S).status_code == 200
        except EngineFailed:
            return False

    def acceptance(self) -> Acceptance:
        return Acceptance.read(self.send("/metrics").text)

    def model_card(self) -> dict[str, Any]:
        """Return the served model, with its `id` and `max_model_len`."""
        return self.send("/v1/models").json()["data"][0]

    def complete(self, body: dict[str, Any]) -> list[list[int]]:
        """Return the token ids of every choice of one `/v1/completions` request, see `choices`."""
        return [choice["token_ids"] for choice in self.choices(body)]

    def choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the choices of one `/v1/completions` request, with `token_ids`.

        Raises:
            EngineFailed: the server refuses the request or fails.
        """
        answer = self.send("/v1/completions", {**body, "return_token_ids": True})
        if answer.status_code != 200:
            raise EngineFailed(f"POST /v1/completions returned {answer.status_code}: {answer.text[:500]}")
        return answer.json()["choices"]

    def _failure(self, what: str) -> EngineFailed:
        text = self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""
        return EngineFailed("\n".join([f"vllm serve {what}", "Its last lines:", *text.splitlines()[-LOG_LINES:]]))


@contextlib.contextmanager
def run_server(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[VllmServer]:
    """Run `vllm serve ARGUMENTS` on a free port with its output in `log`; yield it when it is healthy.

    Args:
        arguments: words after `vllm serve`.
        log: file of the output.
        environment: added to that of every engine (`engine_environment`). Without an API key in it there is none, also
            if this process has one: `send` does not send it.

    Raises:
        EngineFailed: the server did not start, or it ended while the block asked it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    server = VllmServer(
        arguments, {**engine_environment(), API_KEY: "", **(environment or {})}, PROGRAM, log, free_port()
    )
    server.start()
    try:
        yield server
    except EngineFailed:
        server.check_running()
        raise
    finally:
        server.stop()
