"""The page and what it asks for. The page talks to this app alone, which asks the two servers; nothing is kept."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp
from aiohttp import web

from vllm_mtpc.engine.options import API_KEY
from vllm_mtpc.errors import EngineFailed, MtpcError
from vllm_mtpc.play.streams import HEADERS_S, Asked, drafts_of, message_of, model_of, steps

PAGE = Path(__file__).with_name("page.html")


class Side(NamedTuple):
    """A server. folder: of the head that it is to draft with, where several take turns in one server."""

    name: str
    url: str
    folder: str | None = None


class Play:
    """plain: the server without drafts; heads: those with, of which the page shows one at a time."""

    def __init__(self, target: str, plain: Side, heads: Sequence[Side], prompt: str) -> None:
        self.target, self.plain, self.heads, self.prompt = target, plain, list(heads), prompt
        self.session: aiohttp.ClientSession  # while the app runs

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 20)
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

    async def page(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(PAGE, headers={"Content-Type": "text/html; charset=utf-8"})

    async def settings(self, request: web.Request) -> web.Response:
        """What the page begins with; who is not there is said on it."""
        found = []
        for head in self.heads:
            found.append({"name": head.name, "drafts": await drafts_of(self.session, head.url)})
        return web.json_response(
            {"target": self.target, "plain": self.plain.name, "heads": found, "prompt": self.prompt}
        )

    async def ask(self, request: web.Request) -> web.StreamResponse:
        """A line of JSON for every step: {"pieces", "tokens", "ms"}; {"steps", "accepted"} of a server that counts;
        {"error"} where it ends early."""
        try:
            body = await request.json()
            asked = Asked.of(body)
            is_plain = request.match_info["side"] == "plain"
            side = self.plain if is_plain else self.heads[int(body.get("head", 0))]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            return web.json_response({"error": f"not what this page sends: {error!r}"}, status=400)
        if is_plain:
            asked = asked._replace(drafts=None)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(request)
        try:
            model = await model_of(self.session, side.url)
            async for step in steps(self.session, side.url, model, asked):
                await response.write(json.dumps(step._asdict()).encode() + b"\n")
        except EngineFailed as error:
            await response.write(json.dumps({"error": str(error)}).encode() + b"\n")
        except ConnectionError:  # the page has gone, or Stop was pressed: the server is told by our leaving
            pass
        return response

    async def switch(self, request: web.Request) -> web.Response:
        """Another head in the server of the first: heads that are folders share one."""
        try:
            head = self.heads[int((await request.json())["head"])]
        except (ValueError, KeyError, TypeError, IndexError):
            return web.json_response({"error": "not what this page sends"}, status=400)
        if head.folder is None:
            return web.json_response({"head": head.name})
        try:
            async with self.session.post(f"{head.url}/mtpc/head", json={"path": head.folder}) as response:
                if response.status != 200:
                    raise EngineFailed(message_of(await response.text()))
        except (aiohttp.ClientError, OSError, MtpcError, EngineFailed) as error:
            return web.json_response({"error": str(error)}, status=502)
        return web.json_response({"head": head.name})
