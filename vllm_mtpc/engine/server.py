"""Run `vllm serve` as a child process that never outlives its parent, and send it requests.

Every command that serves goes through `VllmServer`: batch jobs and replicas on Ray use a Unix socket, so that two
engines of one machine need no ports and no other user can reach them; the other commands use a port.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import httpx

from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.options import API_KEY
from vllm_mtpc.engine.process import engine_environment
from vllm_mtpc.errors import EngineFailed

if TYPE_CHECKING:
    import aiohttp

PROGRAM = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
HOST = "127.0.0.1"
LOG_LINES = 25  # of the server's output in an error message
HEALTH_TIMEOUT_S = 20.0
ANSWER_TIMEOUT_S = 86400.0  # of a whole answer: all tokens of all prompts of a request
# A connection for each blocking request: vLLM closes those that are idle, and a request must not meet that.
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)


class EngineGone(EngineFailed):
    """The server had ended before it received the request."""


def free_port() -> int:
    """Return a port that nothing listens on now."""
    with socket.create_server((HOST, 0)) as probe:
        return probe.getsockname()[1]


class Client:
    """Blocking requests to one server, from any number of threads.

    Args:
        port: local port of the server.
        timeout_s: longest wait for a part of an answer.
        path: Unix socket of the server, in place of the port.

    Attributes:
        process: id of the server's first process, where this process started it, else 0.
    """

    process = 0

    def __init__(self, port: int = 0, timeout_s: float = ANSWER_TIMEOUT_S, path: str | None = None) -> None:
        self.port, self.timeout_s = port, timeout_s
        self.url = f"http://{HOST}:{port}" if path is None else "http://localhost"
        transport = httpx.HTTPTransport(uds=path, limits=CONNECTIONS, verify=False)
        self._http = httpx.Client(transport=transport, trust_env=False)

    def send(self, path: str, body: Any = None, timeout_s: float | None = None) -> httpx.Response:
        """Return the answer to a GET, or to a POST of a JSON body. Raises EngineFailed if there is none."""
        method = "GET" if body is None else "POST"
        try:
            return self._http.request(method, self.url + path, json=body, timeout=timeout_s or self.timeout_s)
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


class VllmServer:
    """One `vllm serve ARGUMENTS` in a child process.

    Hundreds of requests run at once through `ask`: aiohttp takes 0.35 ms of a core for each, httpx 2.4 ms or more.

    Args:
        arguments: words after `vllm serve`.
        environment: variables added to those of this process.
        program: the command in place of `vllm serve`, for tests.
        output: file that receives the server's output; its last lines are kept for error messages in any case.
        port: local port to listen on; None: a Unix socket.
    """

    _process: subprocess.Popen[str]
    _reader: threading.Thread
    _session: aiohttp.ClientSession | None = None

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PROGRAM,
        output: TextIO | None = None,
        port: int | None = None,
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="vllm_mtpc-")  # short: a socket's path has at most 107 characters
        self._path = str(Path(self._folder, "http")) if port is None else None
        self.client = Client(port or 0, path=self._path)
        where = ["--host", HOST, "--port", str(port)] if self._path is None else ["--uds", self._path]
        self._command = [sys.executable, "-m", "vllm_mtpc.engine.process", *program, *arguments, *where]
        self._environment = {**os.environ, **(environment or {})}
        self._output, self._lines = output, deque[str](maxlen=LOG_LINES)

    def start(self, timeout_s: float = 1800.0) -> None:
        """Start the server and wait until it is healthy.

        Raises:
            EngineFailed: it ended, or was not healthy in time; it is stopped, and the message has its last lines.
        """
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()
        self.client.process = self._process.pid
        deadline = time.monotonic() + timeout_s
        try:
            while not self.client.is_healthy():
                self.check_running()
                if time.monotonic() > deadline:
                    raise self._failure(f"was not healthy after {timeout_s:.0f} s")
                time.sleep(0.25)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and everything that it started."""
        assert self._process.stdin is not None  # a pipe
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # the watcher then ends the server
        self._process.wait()
        self._reader.join(1.0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def check_running(self) -> None:
        """Raise EngineFailed with the last lines of the output if the server has ended."""
        if self._process.poll() is not None:
            self._reader.join(1.0)  # its last lines may still be in the pipe
            raise self._failure(f"ended with exit code {self._process.returncode}")

    def check(self) -> None:
        """Raise EngineFailed unless the server runs and its engine is healthy."""
        self.check_running()
        if not self.client.is_healthy():
            self.check_running()
            raise self._failure("is not healthy")

    @contextlib.asynccontextmanager
    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request and yield the response before its body is read; leaving the context early cancels it.

        vLLM answers 500 to the requests of an engine that dies, so after such a status the engine is checked.

        Raises:
            EngineGone: the server does not accept requests any more.
            EngineFailed: the server or its engine ended before the answer was complete.
        """
        import aiohttp

        if self._session is None:
            connector = aiohttp.UnixConnector(path=self._path or "", limit=0)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        try:
            url = self.client.url + path
            async with self._session.request(method, url, data=body or None, headers=headers) as response:
                if response.status >= 500:
                    await asyncio.to_thread(self.check)
                yield response
        except aiohttp.ClientConnectorError as error:
            raise EngineGone(str(self._failure(f"has ended: {error}"))) from None
        except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
            raise self._failure(f"did not answer: {error!r}") from None

    async def text(self, path: str) -> str:
        async with self.ask("GET", path) as response:
            return await response.text()

    async def close(self) -> None:
        """Stop the server, and the connections of `ask`."""
        if self._session is not None:
            await self._session.close()
        await asyncio.to_thread(self.stop)

    def _failure(self, what: str) -> EngineFailed:
        return EngineFailed(f"vllm serve {what}\nIts last lines:\n" + "\n".join(self._lines))

    def _read_output(self) -> None:
        with contextlib.suppress(ValueError):  # closed while it is read
            for line in self._process.stdout or ():
                self._lines.append(line.rstrip())
                if self._output is not None:
                    self._output.write(line)
                    self._output.flush()


@contextlib.contextmanager
def run_server(arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Client]:
    """Run `vllm serve ARGUMENTS` on a free port with its output in `log`; yield its client when it is healthy.

    Args:
        arguments: words after `vllm serve`.
        log: file of the output.
        environment: added to that of every engine (`engine_environment`). Without an API key in it there is none, also
            if this process has one: `Client` does not send it.

    Raises:
        EngineFailed: the server did not start, or it ended while the block asked it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        variables = {**engine_environment(), API_KEY: "", **(environment or {})}
        server = VllmServer(arguments, variables, PROGRAM, output, free_port())
        server.start()
        try:
            yield server.client
        except EngineFailed:
            server.check_running()
            raise
        finally:
            server.stop()
