"""The page of `python -m examples.play` and what it forwards, with a stand-in for vLLM's API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from examples.play import __main__ as command
from examples.play.app import Play

GONE = "http://127.0.0.1:9"
CHUNKS = [("d", [100]), ("ef re", [1, 2, 3, 4, 5]), ("é", [195, 169]), ("", []), ("\n", [10])]
COUNTS = {"choices": [], "metrics": {"speculative_decoding": {"acceptance_histogram": [1, 0, 2, 0]}}}


class Server:
    """Streams CHUNKS and COUNTS; requests are in `asked`."""

    def __init__(self, template: bool = False) -> None:
        self.template, self.asked = template, []

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((request.path, body, request.headers.get("Authorization")))
        if body.get("vllm_xargs", {}).get("mtpc_drafts", 0) > 7:
            return web.json_response({"error": {"message": "allowed are 0 to 7", "code": 400}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        chunks = [{"choices": [{"text": x, "logprobs": {"tokens": list(x)}, "token_ids": ids}]} for x, ids in CHUNKS]
        for event in [*chunks, COUNTS]:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0.01)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def look(self, request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 512}]})
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        lines = [f'{name}_total{{position="{k}"}} 1.0' for k in range(7)]
        return web.Response(text="\n".join([f"# TYPE {name} counter", *lines, ""]))

    async def tokenize(self, request: web.Request) -> web.Response:
        assert await request.json() == {"messages": [{"role": "user", "content": "a"}]}
        return web.json_response({}, status=200 if self.template else 400)

    def app(self) -> web.Application:
        app = web.Application()
        posts = {"/v1/completions": self.complete, "/v1/chat/completions": self.complete, "/tokenize": self.tokenize}
        app.add_routes([web.post(path, handler) for path, handler in posts.items()])
        app.add_routes([web.get(path, self.look) for path in ("/v1/models", "/metrics")])
        return app


def on_page(server: Server, call: Callable[[aiohttp.ClientSession, str], Any], plain: str | None = None) -> Any:
    """Return what `call` returns for a page with this server on both sides."""

    async def run() -> Any:
        async with AsyncExitStack() as stack:

            async def serve(app: web.Application) -> str:
                runner = web.AppRunner(app)
                stack.push_async_callback(runner.cleanup)
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                return f"http://127.0.0.1:{runner.addresses[0][1]}"

            url = await serve(server.app())
            page = await serve(Play("demo", plain or url, url, "a", "def ").app())
            return await call(await stack.enter_async_context(aiohttp.ClientSession()), page)

    return asyncio.run(run())


JSON = {"Content-Type": "application/json"}
OWN = {**JSON, "Origin": "http://{host}"}
ASK = {"prompt": "def ", "temperature": 0, "max_tokens": 9, "seed": 1}
ROUTES = [("/ask/plain", ASK), ("/ask/head", ASK), ("/settings", None), ("/", None)]


def send(server: Server, path: str, body: Any = None, headers: Any = OWN, plain: str | None = None) -> tuple[int, str]:
    """Return status and text of the answer to a POST of JSON, or to a GET without a body."""

    async def call(session: aiohttp.ClientSession, page: str) -> tuple[int, str]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name: value.format(host=urlsplit(page).netloc) for name, value in headers.items()}
        async with session.request("POST" if data else "GET", page + path, data=data, headers=named) as response:
            return response.status, await response.text()

    return on_page(server, call, plain)


def ask(server: Server, side: str, plain: str | None = None, **more: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in send(server, f"/ask/{side}", {**ASK, **more}, plain=plain)[1].splitlines()]


def test_chunk_is_one_step_and_counts_of_the_server_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    *found, counted = ask(server, "head", drafts=3)
    # two bytes of one letter cannot be separated
    assert [(one["pieces"], one["tokens"]) for one in found] == [
        (["d"], 1),
        (list("ef re"), 5),
        (["é"], 2),
        (["\n"], 1),
    ]
    assert all(before["ms"] < after["ms"] for before, after in pairwise(found))
    assert counted == {"steps": 9 - 4, "accepted": [2, 2, 0]}
    path, body, _ = server.asked[-1]
    assert path == "/v1/completions" and body["vllm_xargs"] == {"mtpc_drafts": 3} and body["seed"] == 1
    monkeypatch.setenv("VLLM_API_KEY", "k")
    ask(server, "plain", drafts=3, chat=True)
    path, body, key = server.asked[-1]
    assert (path, key) == ("/v1/chat/completions", "Bearer k") and not {"vllm_xargs", "prompt"} & body.keys()
    assert body["messages"] == [{"role": "user", "content": "def "}]


def test_server_errors_are_shown() -> None:
    assert "answers 400: allowed are 0 to 7" in ask(Server(), "head", drafts=8)[0]["error"]
    (line,) = ask(Server(), "plain", plain=GONE)
    assert "http://127.0.0.1:9/v1/completions does not answer as vLLM's OpenAI API" in line["error"]


@pytest.mark.parametrize(("template", "plain", "tokens"), [(True, None, 512), (False, None, 512), (False, GONE, None)])
def test_settings_are_those_of_the_servers(template: bool, plain: str | None, tokens: int | None) -> None:
    settings = json.loads(send(Server(template), "/settings", plain=plain)[1])
    assert (settings["head"], settings["drafts"], settings["prompt"]) == ("a", 7, "def ")
    assert (settings["chat"], settings["tokens"]) == (template, tokens)


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_page_refuses_requests_of_other_sites(path: str, body: Any) -> None:
    for headers, status in (
        (OWN, 200),
        (JSON, 200),  # no browser: curl
        ({**JSON, "Host": "[::1]:8600"}, 200),
        ({**JSON, "Origin": "https://elsewhere.example"}, 403),
        ({**JSON, "Origin": "null"}, 403),  # a file, a sandboxed frame
        ({**JSON, "Origin": "http://{host}0"}, 403),
        ({**JSON, "Host": "rebound.example", "Origin": "http://rebound.example"}, 403),
        ({**OWN, "Content-Type": "text/plain"}, 415 if body else 200),  # a browser sends it to other sites unasked
    ):
        server = Server()
        assert send(server, path, body, headers)[0] == status, headers
        assert status == 200 or not server.asked


@pytest.mark.parametrize(
    ("path", "changed"),
    [("/ask/head", {"drafts": -1}), ("/ask/head", b"[1"), ("/ask/plain", {"max_tokens": 0})],
)
def test_page_answers_400_to_values_out_of_range(path: str, changed: Any) -> None:
    server = Server()
    status, text = send(server, path, changed if isinstance(changed, bytes) else {**ASK, **changed})
    assert status == 400 and len(json.loads(text)["error"].splitlines()) == 1 and not server.asked


def test_page_runs_its_own_script_and_no_other() -> None:
    async def call(session: aiohttp.ClientSession, page: str) -> list[tuple[str, str]]:
        answers = [await session.get(page) for _ in range(2)]
        return [(answer.headers["Content-Security-Policy"], await answer.text()) for answer in answers]

    (policy, text), (other, _) = on_page(Server(), call)
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    (nonce,) = re.findall(r'<script nonce="(.*?)">', text)
    assert f"script-src 'nonce-{nonce}'" in policy and nonce not in other and text.count("<script") == 1
    assert "http://" not in text and "https://" not in text and "innerHTML" not in text


def test_public_address_is_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(web, "run_app", lambda *args, **kwargs: None)
    monkeypatch.setattr(command, "run_server", lambda *args: contextlib.nullcontext(SimpleNamespace(url="http://a:1")))
    assert command.main(["--host", "0.0.0.0"]) == 0 and "servers with your" in capsys.readouterr().err
