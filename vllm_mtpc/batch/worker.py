"""One engine of a batch job: it answers the lines of parts.

The engine is `vllm serve` in a child process. If it dies, it is started again, and its unanswered lines are sent again,
at most `attempts` times: a request that kills engines ends with a recorded error. The last attempt of a line runs
alone, so that lines that only shared a batch with such a request are answered.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

from vllm_mtpc.batch.lines import Line, record
from vllm_mtpc.batch.options import BatchOptions
from vllm_mtpc.engine.counters import Acceptance
from vllm_mtpc.engine.options import API_KEY
from vllm_mtpc.engine.server import PROGRAM, VllmServer
from vllm_mtpc.errors import EngineFailed


class Worker:
    """Thread-safe: parts may be answered concurrently.

    Args:
        options: of the job.
        program: command in place of `vllm serve`, for tests; an argument because workers may be on other machines.
    """

    def __init__(self, options: BatchOptions, program: Sequence[str] = PROGRAM) -> None:
        self._options, self._program = options, program
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._slots = asyncio.Semaphore(options.in_flight)
        self._reviving, self._taking_all = asyncio.Lock(), asyncio.Lock()
        self._is_closed = False
        self._call(self._start())

    def __call__(self, part: dict[str, Any]) -> dict[str, Any]:
        """Answer a part, a row of Ray Data.

        Args:
            part: {"name", "lines": JSON}.

        Returns:
            {"name", "text": the part's answers, "lines", "errors", "tokens", "engine", "acceptance": counters so far}.
        """
        return self._call(self._answer(part["name"], [Line(*values) for values in json.loads(part["lines"])]))

    def close(self) -> None:
        """End the engine; pending requests fail."""
        self._is_closed = True
        self._call(self._server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self) -> None:
        # It has no port; with an API key of the environment it would refuse our requests
        server = VllmServer(self._options.command, {API_KEY: "", **self._options.env}, self._program)
        await asyncio.to_thread(server.start, self._options.start_timeout_s)
        self._server, self._name = server, uuid.uuid4().hex

    async def _revive(self, dead: VllmServer) -> None:
        """Replace a dead server once, for all requests that failed with it."""
        async with self._reviving:
            if self._is_closed:
                raise EngineFailed("the job has ended")
            if self._server is dead:
                await dead.close()
                await self._start()

    async def _answer(self, name: str, lines: list[Line]) -> dict[str, Any]:
        answers = await asyncio.gather(*(self._ask(line) for line in lines))
        try:
            acceptance = Acceptance.read(await self._server.text("/metrics"))
        except EngineFailed:  # its counters are lost, the answers are not
            acceptance = Acceptance()
        return {
            "name": name,
            "text": "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers),
            "lines": len(answers),
            "errors": sum(answer["error"] is not None for answer in answers),
            "tokens": sum(map(_tokens, answers)),
            "engine": self._name,
            "acceptance": json.dumps(asdict(acceptance)),
        }

    async def _ask(self, line: Line) -> dict[str, Any]:
        if line.fault:
            return record(line, fault=line.fault)
        body = json.dumps(line.body).encode()
        for attempt in range(self._options.attempts):
            is_last = 0 < attempt == self._options.attempts - 1
            async with self._alone() if is_last else self._slots:
                server = self._server
                try:
                    async with server.ask("POST", line.url, body, {"Content-Type": "application/json"}) as answer:
                        return record(line, answer.status, await answer.text())
                except EngineFailed:
                    await self._revive(server)
        return record(line, fault=f"the engine died while it answered, {self._options.attempts} times in a row")

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Hold all slots: no other request is sent meanwhile."""
        async with self._taking_all:
            for _ in range(self._options.in_flight):
                await self._slots.acquire()
        try:
            yield
        finally:
            for _ in range(self._options.in_flight):
                self._slots.release()


def _tokens(answer: dict[str, Any]) -> int:
    body = (answer["response"] or {}).get("body")
    usage = body.get("usage") if isinstance(body, dict) else None
    return (usage or {}).get("completion_tokens") or 0
