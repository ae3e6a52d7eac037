"""How often the app gives a request to another engine. Its engines are lists of fates here, without Ray's processes."""

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
    """In the place of Serve's handle: hands out one fate after the other, the last one for ever."""

    def __init__(self, *fates):
        self.fates, self.asked = list(fates), 0

    def options(self, **_):
        return self

    def remote(self, _):
        self.asked += 1
        return Parts(self.fates.pop(0) if len(self.fates) > 1 else self.fates[0])


class Parts:
    """One answer, or the exception in its place."""

    def __init__(self, fate):
        self._left = [fate] if isinstance(fate, BaseException) else list(fate)

    async def __anext__(self):
        if not self._left:
            raise StopAsyncIteration
        part = self._left.pop(0)
        if isinstance(part, RayActorError):
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
    """The router's response to a request."""

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    return asyncio.run(Router(engines, attempts, timeout_s)(Request(scope, receive)))


@pytest.fixture(autouse=True)
def short_pause(monkeypatch):
    monkeypatch.setattr(deployments, "PAUSE_S", 0.01)


def test_engines_that_never_had_the_request_are_not_counted():
    """A replica lives on a moment without its server, and Serve sends it more requests than others: it has none."""
    engines = Engines(*[gone("a")] * 10, ANSWER)
    response = ask(engines, attempts=1)
    assert (response.status_code, response.body, response.headers[ATTEMPTS]) == (200, b"hello", "1")
    assert engines.asked == 11


def test_one_engine_is_counted_once():
    """Its server dies with the request, then the replica does with the request that was given to it again."""
    engines = Engines(died("a"), RayActorError("a"), ANSWER)
    response = ask(engines, attempts=2)
    assert (response.status_code, response.headers[ATTEMPTS]) == (200, "2")


def test_request_that_kills_engines_fails():
    engines = Engines(died("a"), gone("a"), RayActorError("b"), died("c"), ANSWER)
    response = ask(engines, attempts=3)
    assert response.status_code == 502
    assert "died with it: 3 in a row" in json.loads(response.body)["error"]["message"]
    assert engines.asked == 4


@pytest.mark.parametrize(("fate", "status"), [(EngineFailed("?"), 502), (gone("a"), 504)])
def test_request_without_an_answer_ends(fate, status):
    """An error that names no engine counts as one more; without engines the time ends the request."""
    assert ask(Engines(fate), attempts=3, timeout_s=0.5).status_code == status
