"""`vllm serve` as a child that never outlives its parent, and asked over a Unix socket.

Replicas on Ray and batch jobs are vLLM's own server, so whatever its API can do they can: nothing of it is written down
twice. A socket in place of a port: two engines of one machine never want the same one, and nobody else can ask it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from vllm_mtpc.errors import EngineFailed

if TYPE_CHECKING:
    import aiohttp

PROGRAM = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
TAIL = 25  # lines of its output that explain why it ended
HEALTH_TIMEOUT_S = 20.0


class EngineGone(EngineFailed):
    """The server was gone when it was asked: the request has not reached it."""


class ServerProcess(subprocess.Popen):
    """A command behind `python -m vllm_mtpc.engine.process`, running until `stop`.

    output: where its lines go, besides the last ones, which are kept for the message of EngineFailed.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: TextIO | None = None) -> None:
        self._output = output
        self._tail: deque[str] = deque(maxlen=TAIL)
        super().__init__(
            [sys.executable, "-m", "vllm_mtpc.engine.process", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def check_running(self) -> None:
        """Raises EngineFailed with its last lines where it has ended."""
        if self.poll() is not None:
            self._reader.join(1.0)  # its last lines are on their way
            raise self.failed(f"ended with exit code {self.returncode}")

    def failed(self, what: str) -> EngineFailed:
        return EngineFailed(f"vllm serve {what}\nIts last lines:\n" + "\n".join(self._tail))

    def stop(self) -> None:
        assert self.stdin is not None  # a pipe
        with contextlib.suppress(OSError):
            self.stdin.close()  # the watcher takes it as our end
        self.wait()
        self._reader.join(1.0)

    def _read_output(self) -> None:
        assert self.stdout is not None  # a pipe
        with contextlib.suppress(ValueError):  # closed while it is read
            for line in self.stdout:
                self._tail.append(line.rstrip())
                if self._output is not None:
                    self._output.write(line)
                    self._output.flush()


class EngineServer:
    """One `vllm serve ARGUMENTS` on a Unix socket.

    environment: added to this process's. program: what is started, for tests. output: as of ServerProcess.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = PROGRAM,
        output: TextIO | None = None,
    ) -> None:
        self._command = [*program, *arguments]
        self._environment = {**os.environ, **(environment or {})}
        self._output = output
        self._folder = Path(tempfile.mkdtemp(prefix="vllm_mtpc-"))  # short: a socket's path has at most 107 characters
        self._process: ServerProcess | None = None
        self._session: aiohttp.ClientSession | None = None

    async def start(self, timeout_s: float = 1800.0) -> None:
        """Starts it and waits until it is healthy. Raises EngineFailed with its last lines; then it has ended."""
        import aiohttp

        socket = str(self._folder / "http")
        self._process = ServerProcess([*self._command, "--uds", socket], self._environment, self._output)
        connector = aiohttp.UnixConnector(path=socket, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        deadline = time.monotonic() + timeout_s
        try:
            while not await self._is_healthy():
                self.check_running()
                if time.monotonic() > deadline:
                    raise self._process.failed(f"was not healthy after {timeout_s:.0f} s")
                await asyncio.sleep(0.25)
        except EngineFailed:
            await self.stop()
            raise

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def ended(self) -> None:
        """Returns when the server has ended by itself."""
        while self._running.poll() is None:
            await asyncio.sleep(0.2)

    def check_running(self) -> None:
        self._running.check_running()

    @property
    def _running(self) -> ServerProcess:
        assert self._process is not None  # `start` comes first
        return self._process

    @property
    def _connected(self) -> aiohttp.ClientSession:
        assert self._session is not None  # `start` comes first
        return self._session

    async def check(self) -> None:
        """Raises EngineFailed unless the server runs and its engine is healthy."""
        self.check_running()
        if not await self._is_healthy():
            self.check_running()
            raise self._running.failed("is not healthy")

    @contextlib.asynccontextmanager
    async def ask(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One request; leaving early ends it.

        Raises EngineFailed where the server does not answer to the end, EngineGone where it takes nothing any more. An
        answer of a server whose engine has died counts as none: vLLM answers 500 to what was being computed.
        """
        import aiohttp

        try:
            url = f"http://localhost{path}"
            async with self._connected.request(method, url, data=body or None, headers=headers) as response:
                if response.status >= 500:
                    await self.check()
                yield response
        except aiohttp.ClientConnectorError as error:
            raise EngineGone(str(self._running.failed(f"has ended: {error}"))) from None
        except (aiohttp.ClientError, ConnectionError, asyncio.IncompleteReadError) as error:
            raise self._running.failed(f"did not answer: {error!r}") from None

    async def text(self, path: str) -> str:
        async with self.ask("GET", path) as response:
            return await response.text()

    async def _is_healthy(self) -> bool:
        import aiohttp

        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            async with self._connected.get("http://localhost/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return False
