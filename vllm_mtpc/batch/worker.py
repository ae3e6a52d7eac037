"""One engine of a batch job: it is given parts and hands back their lines, answered.

The engine is `vllm serve` in a child. When it dies it is started again and what it had not answered is asked again, up
to `attempts` times a line: a request that kills engines ends as a recorded error, not as a loop. The last time a line
is asked alone, so that those that were only next to such a request are answered.
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
from vllm_mtpc.engine.server import PROGRAM, EngineServer
from vllm_mtpc.errors import EngineFailed


class Worker:
    """Thread-safe: several parts may be asked for at once. Ray Data calls it with rows, see `__call__`.

    program: what is started in place of `vllm serve`, for tests; told here, as workers may be on other machines.
    """

    def __init__(self, options: BatchOptions, program: Sequence[str] = PROGRAM) -> None:
        self._options, self._program = options, program
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._slots = asyncio.Semaphore(options.in_flight)
        self._reviving, self._taking_all = asyncio.Lock(), asyncio.Lock()
        self._is_closed = False
        self._call(self._start())

    def answer(self, lines: list[Line]) -> dict[str, Any]:
        """{"text": the part's lines, "lines", "errors", "tokens", and the engine's counters so far}."""
        return self._call(self._answer(lines))

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of Ray Data: {"name", "lines": JSON}."""
        return {"name": row["name"], **self.answer([Line(*values) for values in json.loads(row["lines"])])}

    def close(self) -> None:
        """Ends the engine; what is asked still is not answered any more."""
        self._is_closed = True
        self._call(self._server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _start(self) -> None:
        """Sets `_server` once it can be asked."""
        # It has no port; a key of other servers in our environment would have it refuse what we ask
        server = EngineServer(self._options.command, {API_KEY: "", **self._options.env}, self._program)
        await server.start(self._options.start_timeout_s)
        self._server, self._name = server, uuid.uuid4().hex

    async def _revive(self, dead: EngineServer) -> None:
        """Another server in the place of `dead`; whoever comes second finds it there."""
        async with self._reviving:
            if self._is_closed:
                raise EngineFailed("the job has ended")
            if self._server is dead:
                await dead.stop()
                await self._start()

    async def _answer(self, lines: list[Line]) -> dict[str, Any]:
        answers = await asyncio.gather(*(self._ask(line) for line in lines))
        return {
            "text": "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers),
            "lines": len(answers),
            "errors": sum(answer["error"] is not None for answer in answers),
            "tokens": sum(map(_tokens, answers)),
            "engine": self._name,
            "acceptance": json.dumps(asdict(await self._acceptance())),
        }

    async def _ask(self, line: Line) -> dict[str, Any]:
        if line.fault:
            return record(line, None, None, line.fault)
        body = json.dumps(line.body).encode()
        for attempt in range(self._options.attempts):
            is_last = 0 < attempt == self._options.attempts - 1
            async with self._alone() if is_last else self._slots:
                server = self._server
                try:
                    async with server.ask("POST", line.url, body, {"Content-Type": "application/json"}) as answer:
                        text = await answer.text()
                        return record(line, answer.status, _json(text))
                except EngineFailed:
                    await self._revive(server)
        return record(line, None, None, f"the engine died while it answered, {self._options.attempts} times in a row")

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """All slots: nothing else is asked meanwhile."""
        async with self._taking_all:
            for _ in range(self._options.in_flight):
                await self._slots.acquire()
        try:
            yield
        finally:
            for _ in range(self._options.in_flight):
                self._slots.release()

    async def _acceptance(self) -> Acceptance:
        try:
            return Acceptance.read(await self._server.text("/metrics"))
        except EngineFailed:  # the counters of this engine are lost, the answers are not
            return Acceptance()


def _tokens(answer: dict[str, Any]) -> int:
    """Tokens that were written for an answer, as the server counts them."""
    body = (answer["response"] or {}).get("body")
    usage = body.get("usage") if isinstance(body, dict) else None
    return (usage or {}).get("completion_tokens") or 0


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
