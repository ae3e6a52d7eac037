"""How often the app sends a request to another engine; engines are lists of answers, without Ray's processes."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from ray.exceptions import RayActorError
from starlette.requests import Request

from vllm_mtpc.engine.server import EngineGone
from vllm_mtpc.errors import EngineFailed
from vllm_mtpc.ray_serve import deployments
from vllm_mtpc.ray_serve.deployments import ATTEMPTS, Head, Router

ANSWER = (Head(200, {}, False), b"hello")


class Engines:
    """In the place of Serve's handle: gives one answer after the other, the last one for ever."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), 0

    def options(self, **_):
        return self

    def remote(self, _):
        self.asked += 1
        return Parts(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])


class Parts:
    def __init__(self, answer):
        self._left = iter([answer] if isinstance(answer, BaseException) else answer)

    async def __anext__(self):
        part = next(self._left, StopAsyncIteration())
        if isinstance(part, (RayActorError, StopAsyncIteration)):
            raise part
        return part  # an EngineFailed too: an engine that lives does not raise it

    def cancel(self):
        pass


def died(engine: str, kind: type[EngineFailed] = EngineFailed) -> EngineFailed:
    error = kind("it was computing")
    error.actor_id = engine
    return error


def gone(engine: str) -> EngineFailed:
    return died(engine, EngineGone)


def ask(engines: Engines, attempts: int, timeout_s: float = 60.0):

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    return asyncio.run(Router(engines, attempts, timeout_s)(Request(scope, receive)))


@pytest.fixture(autouse=True)
def short_pause(monkeypatch):
    monkeypatch.setattr(deployments, "PAUSE_S", 0.01)


@pytest.mark.parametrize(
    ("answers", "attempts", "status", "counted", "asked"),
    [
        ([*[gone("a")] * 10, ANSWER], 1, 200, "1", 11),  # engines that never had the request are not counted
        ([died("a"), RayActorError("a"), ANSWER], 2, 200, "2", 3),  # one engine is counted once: server, then replica
        ([died("a"), gone("a"), RayActorError("b"), died("c"), ANSWER], 3, 502, None, 4),
    ],
)
def test_engines_that_died_with_a_request_are_counted(answers, attempts, status, counted, asked):
    """An ended server accepts nothing, but Serve prefers its replica for a moment, because it has no requests."""
    engines = Engines(*answers)
    response = ask(engines, attempts)
    assert (response.status_code, response.headers.get(ATTEMPTS), engines.asked) == (status, counted, asked)
    if status == 200:
        assert response.body == b"hello"
    else:
        assert f"died with it: {attempts} in a row" in json.loads(response.body)["error"]["message"]


@pytest.mark.parametrize(("answer", "status"), [(EngineFailed("?"), 502), (gone("a"), 504)])
def test_request_without_an_answer_ends(answer, status):
    """An error that names no engine counts as one more; without engines the time ends the request."""
    assert ask(Engines(answer), attempts=3, timeout_s=0.5).status_code == status
