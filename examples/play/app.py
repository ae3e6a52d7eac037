"""The web app of `python -m examples.play`: it serves the page and forwards its requests to the two servers.

vLLM sends a chunk per step of a request, so a chunk of k tokens has k - 1 accepted drafts and one token of the target.
A busy server joins chunks, and the live numbers are then too high. With --per-request-spec-decode-metrics summary a
server reports the exact counts at the end.

The app adds the API key to forwarded requests, so it answers only its own page: the Host header must be an IP address,
localhost or the name of --host. This prevents DNS rebinding.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import BaseModel, Field, ValidationError

from vllm_mtpc.engine.server import API_KEY, Acceptance
from vllm_mtpc.errors import EngineFailed, one_line, printable

HEADERS_S = 30.0  # longest wait for a connection
PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; script-src 'nonce-NONCE'; style-src 'nonce-NONCE'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Play:
    """App of a server without drafts and of one with a head.

    Args:
        target: its name on the page.
        plain: address of the server without drafts.
        head: address of the server with a head.
        name: of the head on the page.
        prompt: that the page starts with.
    """

    def __init__(self, target: str, plain: str, head: str, name: str, prompt: str) -> None:
        self.target, self.name, self.prompt = target, name, prompt
        self.urls = {"plain": plain, "head": head}
        self.session: aiohttp.ClientSession  # while the app runs

    def app(self, host: str = "localhost") -> web.Application:
        """Return the app; `host`: its name in addition to localhost and IP addresses."""
        app = web.Application(client_max_size=1 << 20, middlewares=[self._check_sender])
        self.hosts = re.compile(rf"(localhost|{re.escape(host)}|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
        app.cleanup_ctx.append(self._connected)
        app.add_routes(
            [
                web.get("/", self.page),
                web.get("/settings", self.settings),
                web.post("/ask/{side:plain|head}", self.ask),
            ]
        )
        return app

    async def _connected(self, app: web.Application) -> AsyncIterator[None]:
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=HEADERS_S)
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as self.session:
            yield

    @web.middleware
    async def _check_sender(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse requests of other sites, and bodies other than JSON, which a browser sends to other sites unasked."""
        own = (None, f"http://{request.host}", f"https://{request.host}")
        if not self.hosts.fullmatch(request.host) or request.headers.get("Origin") not in own:
            raise web.HTTPForbidden(text="a request of another site; open the page as localhost or by its IP address")
        if request.method == "POST" and request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="the body must have the type application/json")
        try:
            return await handler(request)
        except ValidationError as error:
            return web.json_response({"error": f"not what this page sends: {one_line(error, Asked)}"}, status=400)

    async def page(self, request: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe()
        text, policy = (text.replace("NONCE", nonce) for text in (PAGE.read_text(encoding="utf-8"), POLICY))
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def settings(self, request: web.Request) -> web.Response:
        """Return the settings that the page starts with."""
        plain, head = self.urls.values()
        shown: dict[str, Any] = {"target": self.target, "head": self.name, "prompt": self.prompt}
        shown |= {"drafts": None, "tokens": None, "chat": False}  # drafts: at most in a step
        with contextlib.suppress(EngineFailed):
            async with answer(self.session, f"{head}/metrics") as response:
                shown["drafts"] = len(Acceptance.read(await response.text()).accepted_per_position) or None
            async with answer(self.session, f"{plain}/v1/models") as response:
                shown["tokens"] = (await response.json())["data"][0]["max_model_len"]
            async with answer(self.session, f"{plain}/tokenize", json={"messages": [{"role": "user", "content": "a"}]}):
                shown["chat"] = True  # vLLM has a chat template for this model
        return web.json_response(shown)

    async def ask(self, request: web.Request) -> web.StreamResponse:
        """Stream a line of JSON for each of `steps`, or {"error"}."""
        asked, side = Asked.model_validate_json(await request.read()), request.match_info["side"]
        if side == "plain":
            asked.drafts = None
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(request)
        try:
            async for step in steps(self.session, self.urls[side], asked):
                await response.write(json.dumps(step).encode() + b"\n")
        except EngineFailed as error:
            await response.write(json.dumps({"error": str(error)}).encode() + b"\n")
        except ConnectionError:  # the page was closed, or Stop was pressed: returning cancels the request
            pass
        return response


class Asked(BaseModel):
    """A request of the page; `drafts`: maximum per step (None: the server's); `chat`: use the chat template."""

    prompt: str
    temperature: float = Field(ge=0, allow_inf_nan=False)
    max_tokens: int = Field(ge=1)
    seed: int | None = None
    drafts: int | None = Field(None, ge=0)
    chat: bool = False

    def request(self) -> tuple[str, dict[str, Any]]:
        """Return the path and body for the API."""
        body: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        body |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}  # with the counts
        if self.seed is not None:
            body["seed"] = self.seed
        if self.drafts is not None:
            body["vllm_xargs"] = {"mtpc_drafts": self.drafts}
        if self.chat:
            messages = [{"role": "user", "content": self.prompt}]
            return "/v1/chat/completions", body | {"messages": messages, "logprobs": True, "top_logprobs": 0}
        return "/v1/completions", body | {"prompt": self.prompt, "logprobs": 0}


@contextlib.asynccontextmanager
async def answer(session: aiohttp.ClientSession, url: str, **more: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the answer to a POST of `json`, or to a GET without it.

    Raises:
        EngineFailed: the server does not answer, or with an error, or not as vLLM does.
    """
    try:
        async with session.request("POST" if "json" in more else "GET", url, **more) as response:
            if response.status != 200:
                raise EngineFailed(f"{url} answers {response.status}: {_message_of(await response.text())}")
            yield response
    except (aiohttp.ClientError, OSError, LookupError, ValueError) as error:
        raise EngineFailed(f"{url} does not answer as vLLM's OpenAI API: {error or type(error).__name__}") from None


async def steps(session: aiohttp.ClientSession, url: str, asked: Asked) -> AsyncIterator[dict[str, Any]]:
    """Yield the steps of one answer, then the server's counts if it has them. Raises EngineFailed.

    A step is one chunk: its tokens as text ("pieces", one if they cannot be separated), their number ("tokens"), and
    the milliseconds since the request ("ms"). The counts are the target's "steps" and "accepted" drafts by position.
    """
    path, body = asked.request()
    started, counted = time.perf_counter(), 0
    async with answer(session, url + path, json=body) as response:
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise EngineFailed(f"{url}: {event['error'].get('message', event['error'])}")
            if of_request := (event.get("metrics") or {}).get("speculative_decoding"):
                by_count = of_request["acceptance_histogram"]  # of steps with drafts
                accepted = [sum(by_count[k:]) for k in range(1, len(by_count))]
                yield {"steps": counted - sum(accepted), "accepted": accepted}
            for choice in event["choices"]:
                if tokens := len(choice.get("token_ids") or ()):
                    ms = 1000 * (time.perf_counter() - started)
                    yield {"pieces": _pieces_of(choice, tokens), "tokens": tokens, "ms": ms}
                counted += tokens


def _pieces_of(choice: dict[str, Any], tokens: int) -> list[str]:
    """Return the chunk's text token by token if the server separates it, else in one piece."""
    text: str = choice.get("text") or choice.get("delta", {}).get("content") or ""
    logprobs = choice.get("logprobs") or {}
    pieces = logprobs.get("tokens") or [one["token"] for one in logprobs.get("content") or []]
    if len(pieces) == tokens and "".join(pieces) == text:
        return pieces
    return list(text) if len(text) == tokens else [text]


def _message_of(text: str) -> str:
    with contextlib.suppress(LookupError, TypeError, ValueError):
        text = str(json.loads(text)["error"]["message"])
    return printable(" ".join(text.split()), 400)
