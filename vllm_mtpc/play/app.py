"""The web app of `vllm-mtpc play`: it serves the page and forwards its requests to the two servers.

The app adds the API key to forwarded requests, so it answers only its own page: the Host header must be an IP address,
localhost or the name of --host. This prevents DNS rebinding.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler
from pydantic import ValidationError

from vllm_mtpc.engine.options import API_KEY
from vllm_mtpc.errors import EngineFailed, one_line
from vllm_mtpc.play.streams import HEADERS_S, Asked, Chosen, answer, drafts_of, model_of, steps

PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; script-src 'nonce-NONCE'; style-src 'nonce-NONCE'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Side(NamedTuple):
    """A server; `folder`: of its head, if several heads share the server."""

    name: str
    url: str
    folder: str | None = None


class Play:
    """App of a server without drafts and of heads; the page shows one head at a time."""

    def __init__(self, target: str, plain: Side, heads: Sequence[Side], prompt: str) -> None:
        self.target, self.plain, self.heads, self.prompt = target, plain, list(heads), prompt
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
                web.post("/ask/{side}", self.ask),
                web.post("/switch", self.switch),
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
        except (ValidationError, IndexError) as error:
            reason = one_line(error, Asked) if isinstance(error, ValidationError) else "there is no such head"
            return web.json_response({"error": f"not what this page sends: {reason}"}, status=400)

    async def page(self, request: web.Request) -> web.Response:
        nonce = secrets.token_urlsafe()
        text, policy = (text.replace("NONCE", nonce) for text in (PAGE.read_text(encoding="utf-8"), POLICY))
        return web.Response(text=text, content_type="text/html", headers={"Content-Security-Policy": policy})

    async def settings(self, request: web.Request) -> web.Response:
        """Return the settings that the page starts with; servers that do not answer are left out."""
        shown: dict[str, Any] = {"target": self.target, "prompt": self.prompt, "tokens": None, "chat": False}
        shown["heads"] = [{"name": one.name, "drafts": await drafts_of(self.session, one.url)} for one in self.heads]
        with contextlib.suppress(EngineFailed):
            model = await model_of(self.session, self.plain.url)
            shown["tokens"] = model.get("max_model_len")
            body = {"model": model["id"], "messages": [{"role": "user", "content": "a"}]}
            async with answer(self.session, f"{self.plain.url}/tokenize", json=body):
                shown["chat"] = True  # vLLM has a chat template for this model
        return web.json_response(shown)

    async def ask(self, request: web.Request) -> web.StreamResponse:
        """Stream a line of JSON per step, {"pieces", "tokens", "ms"}; then {"steps", "accepted"}, or {"error"}."""
        asked = Asked.model_validate_json(await request.read())
        is_plain = request.match_info["side"] == "plain"
        side = self.plain if is_plain else self.heads[asked.head]
        if is_plain:
            asked.drafts = None
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(request)
        try:
            model = await model_of(self.session, side.url)
            async for step in steps(self.session, side.url, model["id"], asked):
                await response.write(json.dumps(step._asdict()).encode() + b"\n")
        except EngineFailed as error:
            await response.write(json.dumps({"error": str(error)}).encode() + b"\n")
        except ConnectionError:  # the page was closed, or Stop was pressed: returning cancels the request
            pass
        return response

    async def switch(self, request: web.Request) -> web.Response:
        """Change the head of the server that the heads share."""
        head = self.heads[Chosen.model_validate_json(await request.read()).head]
        try:
            if head.folder is not None:
                async with answer(self.session, f"{head.url}/mtpc/head", json={"path": head.folder}):
                    pass
        except EngineFailed as error:
            return web.json_response({"error": str(error)}, status=502)
        return web.json_response({"head": head.name})
