"""The two deployments of the app: engines, and the router that sends them requests.

    client ── HTTP ──► Serve's proxy ──► Router (head node) ──► Engine ── Unix socket ──► vllm serve
                                              └── dies unanswered? another Engine

The router keeps a request until an engine starts to answer. If the engine dies (its process, replica or node), another
one receives the request. An answer that is not streamed is returned only when it is complete, so the request can always
be retried. A stream that has started cannot: it ends with an error event. After `attempts` engines the response is 502,
without an answer in time 504. Only engines that had the request are counted, each once: Serve prefers a replica whose
server has just died, because it has no requests. The router runs on the head node, without which there is no cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import ray
from prometheus_client import CONTENT_TYPE_LATEST, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, WorkerCrashedError
from ray.serve.config import AutoscalingConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from vllm_mtpc.engine.server import PROGRAM, EngineGone, VllmServer
from vllm_mtpc.errors import EngineFailed, UsageError, first_line, validate
from vllm_mtpc.ray_serve.options import ServeOptions

logger = logging.getLogger("ray.serve")
DIED = (EngineFailed, RayActorError, ObjectLostError, WorkerCrashedError)
HEAD_NODE = {"node:__internal_head__": 0.001}
# Headers of a connection, not of a request or response.
OF_CONNECTION = {"host", "content-length", "connection", "keep-alive", "transfer-encoding", "upgrade", "te", "date"}
OF_RESPONSE = OF_CONNECTION | {"x-request-id"}  # set by Serve's proxy
ATTEMPTS = "x-vllm-mtpc-attempts"  # of a response: engines that had the request
PAUSE_S = 0.2  # before another engine receives a request
METRICS_S = 10.0  # longest wait for an engine's /metrics
ABORTED = b'"finish_reason":"abort"'  # in a response of a server that is being stopped


class Asked(NamedTuple):
    """A request of a client; `path` has the query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Head(NamedTuple):
    """Start of a response; its bytes follow, all at once or as events of a stream."""

    status: int
    headers: dict[str, str]
    is_stream: bool


class Engine:
    """A replica: one `vllm serve`."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, command: Sequence[str], environment: dict[str, str], start_timeout_s: float, program: Sequence[str]
    ) -> None:
        self.server = VllmServer(command, environment, program, output=sys.stderr)
        await asyncio.to_thread(self.server.start, start_timeout_s)
        self._watch = asyncio.create_task(self._end_with_server())

    async def check_health(self) -> None:
        """Raise EngineFailed for a replica that Serve must replace."""
        await asyncio.to_thread(self.server.check)

    async def metrics(self) -> tuple[str, str]:
        """Return the replica's name and its server's /metrics; empty if it does not answer."""
        try:
            text = await asyncio.wait_for(self.server.text("/metrics"), METRICS_S)
        except (EngineFailed, asyncio.TimeoutError):
            text = ""
        return serve.get_replica_context().replica_id.unique_id, text

    async def forward(self, asked: Asked) -> AsyncIterator[Head | bytes | EngineFailed]:
        """Yield the response's head and bytes; a failure is yielded, as Serve logs tracebacks of exceptions."""
        try:
            async with self.server.ask(asked.method, asked.path, asked.body, asked.headers) as answer:
                is_stream = answer.content_type == "text/event-stream"
                headers = {name: value for name, value in answer.headers.items() if name.lower() not in OF_RESPONSE}
                body = b"" if is_stream else await answer.read()
                if ABORTED in body:
                    raise EngineGone("vllm serve is being stopped and has aborted the request")
                yield Head(answer.status, headers, is_stream)
                if is_stream:
                    async for part in answer.content.iter_any():
                        yield part
                else:
                    yield body
        except EngineFailed as error:
            short = type(error)(first_line(error))  # its output is in the log
            short.actor_id = ray.get_runtime_context().get_actor_id()  # type: ignore[attr-defined]  # as Ray's
            yield short

    async def _end_with_server(self) -> None:
        """End a replica whose server has ended, before Serve's next health check."""
        try:
            while True:
                self.server.check_running()
                await asyncio.sleep(0.2)
        except EngineFailed as error:
            logger.error("this replica ends: %s (%s)", first_line(error), error.reason)  # its output is above
        os._exit(1)

    async def __del__(self) -> None:
        self._watch.cancel()
        await self.server.close()


class Router:
    """Entrance of the app: send each request to an engine, and to another one if that dies."""

    def __init__(self, engines: DeploymentHandle, attempts: int, timeout_s: float) -> None:
        self._replicas, self._engines = engines, engines.options(stream=True, method_name="forward")
        self._attempts, self._timeout_s = attempts, timeout_s

    async def __call__(self, request: Request) -> Response:
        if request.url.path.rstrip("/") == "/metrics":
            return await self._metrics()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: value for name, value in request.headers.items() if name.lower() not in OF_CONNECTION}
        asked = Asked(request.method, path, headers, await request.body())
        deadline = time.monotonic() + self._timeout_s
        died: set[str] = set()  # engines that had the request
        while len(died) < self._attempts:
            parts = self._engines.remote(asked)
            try:
                head = await _next(parts, deadline)
                first = await _next(parts, deadline)
            except DIED as error:
                if not isinstance(error, EngineGone):  # an engine without a name is one more: a request must end
                    died.add(getattr(error, "actor_id", None) or uuid.uuid4().hex)
                logger.warning("%s %s: retried after %s", asked.method, asked.path, _short(error))
                await asyncio.sleep(PAUSE_S)
                continue
            except asyncio.TimeoutError:
                parts.cancel()
                return _error(504, f"no answer in {self._timeout_s:g} s; the app's key request_timeout_s sets this")
            except asyncio.CancelledError:  # the client has gone
                parts.cancel()
                raise
            headers = {**head.headers, ATTEMPTS: str(len(died) + 1)}
            if not head.is_stream:
                return Response(first or b"", head.status, headers)
            return StreamingResponse(self._stream(parts, first), head.status, headers)
        return _error(502, f"the engines that this request was given to have died with it: {self._attempts} in a row")

    async def _metrics(self) -> Response:
        try:
            asked = self._replicas.broadcast("metrics")
            answers = await asked.results_async(timeout_s=2 * METRICS_S, return_exceptions=True)
        except (DeploymentUnavailableError, TimeoutError) as error:
            return _error(503, f"the engines give no metrics: {_short(error)}")
        texts = dict(one for one in answers if not isinstance(one, BaseException))
        return Response(with_replicas(texts), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _stream(self, parts: Any, part: bytes | None) -> AsyncIterator[bytes]:
        try:
            while part is not None:
                yield part
                part = await _next(parts, time.monotonic() + self._timeout_s)
        except DIED as error:
            logger.warning("a stream ended early: %s", _short(error))
            yield _event("the engine died while it answered; ask again")
        except asyncio.TimeoutError:
            yield _event(f"the stream stood still for {self._timeout_s:g} s")
        finally:
            parts.cancel()  # does nothing after its end


def build(options: ServeOptions, program: Sequence[str] = PROGRAM) -> serve.Application:
    """Return the app; `program`: command in place of `vllm serve`, for tests."""
    gpus = options.num_gpus(ray.is_initialized() and bool(ray.cluster_resources().get("GPU")))
    engines = serve.deployment(
        Engine,
        name="Engine",
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": gpus},
        max_ongoing_requests=options.max_ongoing_requests,
        health_check_period_s=options.health_period_s,
        health_check_timeout_s=60,
        graceful_shutdown_timeout_s=min(60.0, options.request_timeout_s),
        **_scale(options),
    ).bind(options.command, options.environment, options.start_timeout_s, list(program))
    router = serve.deployment(
        Router,
        name="Router",
        ray_actor_options={"num_cpus": 0, "resources": HEAD_NODE},
        max_ongoing_requests=100_000,  # engines have the limit
    )
    return router.bind(engines, options.attempts, options.request_timeout_s)


def with_replicas(texts: Mapping[str, str]) -> bytes:
    """Merge the /metrics of replicas, by their names; every sample gets the label `replica`."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            whole = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            whole.samples += [one._replace(labels={**one.labels, "replica": replica}) for one in family.samples]
    return generate_latest(SimpleNamespace(collect=families.values))


def _scale(options: ServeOptions) -> dict[str, Any]:
    """Return Serve's options for the number of replicas. Raises UsageError for what Serve refuses."""
    if options.max_replicas is None:
        if options.autoscaling:
            raise UsageError("autoscaling is given, but it is off; name max_replicas, or leave it out")
        return {"num_replicas": options.replicas}
    named = options.model_dump(include={"min_replicas", "max_replicas", "target_ongoing_requests"})
    config = {**options.autoscaling, **named, "initial_replicas": max(options.replicas, options.min_replicas)}
    if unknown := ", ".join(sorted(options.autoscaling.keys() - AutoscalingConfig.model_fields.keys())):
        allowed = ", ".join(sorted(AutoscalingConfig.model_fields))
        raise UsageError(f"autoscaling: unknown key {unknown}; allowed: {allowed}")
    return {"autoscaling_config": validate(AutoscalingConfig, config, UsageError, "autoscaling: ")}


async def _next(parts: Any, deadline: float) -> Any:
    """Return the next part of a response, None after the last. Raises the EngineFailed that ends it."""
    try:
        part = await asyncio.wait_for(anext(parts), max(0.0, deadline - time.monotonic()))
    except StopAsyncIteration:
        return None
    if isinstance(part, EngineFailed):
        raise part
    return part


def _short(error: BaseException) -> str:
    return first_line(getattr(error, "cause", None) or error)  # without the text that Ray adds


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "EngineFailed", "param": None, "code": status}}, status)


def _event(message: str) -> bytes:
    return b"data: " + bytes(_error(502, message).body) + b"\n\ndata: [DONE]\n\n"
