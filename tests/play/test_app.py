"""What stands between the page and the two servers, against a stand-in for vLLM's API."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from vllm_mtpc.cli import main
from vllm_mtpc.play import command
from vllm_mtpc.play.app import Play, Side

GONE = Side("plain", "http://127.0.0.1:9")
CHUNKS = [("d", [100]), ("ef re", [1, 2, 3, 4, 5]), ("é", [195, 169]), ("", []), ("\n", [10])]


class Server:
    """Streams CHUNKS; what it was asked is in `asked`."""

    def __init__(self, counts: bool = False, template: bool = False) -> None:
        self.counts, self.template, self.asked, self.left = counts, template, [], 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.asked.append((request.path, body, request.headers.get("Authorization")))
        if body.get("vllm_xargs", {}).get("mtpc_drafts", 0) > 7:
            return web.json_response({"error": {"message": "allowed are 0 to 7", "code": 400}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for text, ids in CHUNKS * (1000 if "long" in body.get("prompt", "") else 1):
                choice = {"text": text, "logprobs": {"tokens": list(text)}, "token_ids": ids}
                await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
                await asyncio.sleep(0.01)
        except ConnectionError:
            self.left += 1
            raise
        if self.counts:
            event = {"choices": [], "metrics": {"speculative_decoding": {"acceptance_histogram": [1, 0, 2, 0]}}}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def look(self, request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 512}]})
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        lines = [f'{name}_total{{position="{k}"}} 1.0' for k in range(7)]
        return web.Response(text="\n".join([f"# TYPE {name} counter", *lines, ""]))

    async def tokenize(self, request: web.Request) -> web.Response:
        assert await request.json() == {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        return web.json_response({}, status=200 if self.template else 400)

    async def swap(self, request: web.Request) -> web.Response:
        path = (await request.json())["path"]
        self.asked.append((request.path, path, None))
        if path == "bad":
            return web.json_response({"error": {"message": "the head is not swapped"}}, status=400)
        return web.json_response({"head": path})

    def app(self) -> web.Application:
        app = web.Application()
        posts = {"/v1/completions": self.complete, "/v1/chat/completions": self.complete, "/tokenize": self.tokenize}
        app.add_routes([web.post(path, handler) for path, handler in {**posts, "/mtpc/head": self.swap}.items()])
        app.add_routes([web.get(path, self.look) for path in ("/v1/models", "/metrics")])
        return app


def on_page(server: Server, call: Callable[[aiohttp.ClientSession, str], Any], plain: Side | None = None) -> Any:
    """What `call` returns of a page before this server on both sides."""

    async def run() -> Any:
        async with AsyncExitStack() as stack:

            async def serve(app: web.Application) -> str:
                runner = web.AppRunner(app)
                stack.push_async_callback(runner.cleanup)
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                return f"http://127.0.0.1:{runner.addresses[0][1]}"

            url = await serve(server.app())
            heads = [Side("a", url, "good"), Side("b", url, "bad"), Side("c", url)]
            page = await serve(Play("demo", plain or Side("plain", url), heads, "def ").app())
            return await call(await stack.enter_async_context(aiohttp.ClientSession()), page)

    return asyncio.run(run())


JSON = {"Content-Type": "application/json"}
OWN = {**JSON, "Origin": "http://{host}"}
ASK = {"prompt": "def ", "temperature": 0, "max_tokens": 9, "head": 0}
ROUTES = [("/ask/plain", ASK), ("/ask/head", ASK), ("/switch", {"head": 0}), ("/settings", None), ("/", None)]


def send(server: Server, path: str, body: Any = None, headers: Any = OWN, plain: Side | None = None) -> tuple[int, str]:
    """Status and text of the answer to a POST of JSON, or to a GET without a body."""

    async def call(session: aiohttp.ClientSession, page: str) -> tuple[int, str]:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        named = {name: value.format(host=urlsplit(page).netloc) for name, value in headers.items()}
        async with session.request("POST" if data else "GET", page + path, data=data, headers=named) as response:
            return response.status, await response.text()

    return on_page(server, call, plain)


def asked(server: Server, side: str, **more: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in send(server, f"/ask/{side}", {**ASK, "seed": 1, **more})[1].splitlines()]


def test_chunk_is_one_step() -> None:
    server = Server()
    found = asked(server, "head", drafts=3)
    assert [(one["pieces"], one["tokens"]) for one in found] == [
        (["d"], 1),
        (list("ef re"), 5),
        (["é"], 2),  # two bytes of one letter cannot be told apart
        (["\n"], 1),
    ]
    assert all(before["ms"] < after["ms"] for before, after in pairwise(found))
    path, body, _ = server.asked[-1]
    assert path == "/v1/completions" and body["vllm_xargs"] == {"mtpc_drafts": 3} and body["seed"] == 1
    asked(server, "plain", drafts=3)
    assert "vllm_xargs" not in server.asked[-1][1]


def test_counts_of_the_server_come_last() -> None:
    assert asked(Server(counts=True), "head")[-1] == {"steps": 9 - 4, "accepted": [2, 2, 0]}


def test_chat_uses_the_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setenv("VLLM_API_KEY", "k")
    asked(server, "head", chat=True)
    path, body, key = server.asked[-1]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert body["messages"] == [{"role": "user", "content": "def "}] and "prompt" not in body


def test_server_errors_are_shown() -> None:
    (error,) = asked(Server(), "head", drafts=8)
    assert "answers 400: allowed are 0 to 7" in error["error"]
    _, text = send(Server(), "/ask/plain", ASK, plain=GONE)
    assert "http://127.0.0.1:9/v1/models does not answer as vLLM's OpenAI API" in json.loads(text)["error"]


def test_client_disconnect_cancels_request() -> None:
    server = Server()

    async def call(session: aiohttp.ClientSession, page: str) -> None:
        async with session.post(f"{page}/ask/plain", json={**ASK, "prompt": "long"}) as response:
            await response.content.readline()
        for _ in range(200):
            if server.left:
                return
            await asyncio.sleep(0.02)

    on_page(server, call)
    assert server.left == 1


def test_settings_and_switch() -> None:
    server = Server()
    settings = json.loads(send(server, "/settings")[1])
    assert settings["heads"] == [{"name": name, "drafts": 7} for name in "abc"] and settings["prompt"] == "def "
    answers = [send(server, "/switch", {"head": head}) for head in (0, 1, 2, 3)]
    assert [status for status, _ in answers] == [200, 502, 200, 400]
    good, bad, of_url, _ = (json.loads(text) for _, text in answers)
    assert (good, of_url) == ({"head": "a"}, {"head": "c"})
    assert bad["error"].endswith("answers 400: the head is not swapped")
    assert [one[1] for one in server.asked] == ["good", "bad"]


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (OWN, 200),
        (JSON, 200),  # no browser: curl
        ({**JSON, "Origin": "https://elsewhere.example"}, 403),
        ({**JSON, "Origin": "null"}, 403),  # a file, a sandboxed frame
        ({**JSON, "Origin": "http://{host}0"}, 403),
        ({**JSON, "Host": "rebound.example"}, 403),
        ({**JSON, "Host": "rebound.example", "Origin": "http://rebound.example"}, 403),
        ({**JSON, "Host": "[::1", "Origin": "http://["}, 403),
        ({**JSON, "Host": "localhost:8600"}, 200),
        ({**JSON, "Host": "[::1]:8600"}, 200),
    ],
)
def test_page_refuses_requests_of_other_sites(path: str, body: Any, headers: dict[str, str], status: int) -> None:
    server = Server()
    assert send(server, path, body, headers)[0] == status
    assert status == 200 or not server.asked


@pytest.mark.parametrize(("path", "body"), ROUTES[:3])
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_page_refuses_bodies_without_the_type_of_json(path: str, body: Any, kind: str) -> None:
    """A browser sends text/plain and forms to other sites without asking them first."""
    server = Server()
    status, text = send(server, path, body, {**OWN, "Content-Type": kind})
    assert status == 415 and "application/json" in text and not server.asked


@pytest.mark.parametrize(
    ("path", "changed"),
    [
        *(("/ask/head", {"head": head}) for head in (-1, 9, "x")),
        *(("/switch", {"head": head}) for head in (-1, 3, None, 1e999)),
        *(("/ask/plain", {"temperature": hot}) for hot in ("hot", -1, float("nan"), float("inf"))),
        *(("/ask/plain", {"max_tokens": most}) for most in (0, float("nan"), float("inf"))),
        *(("/ask/head", {"drafts": most}) for most in (-1, float("nan"))),
        ("/ask/head", {"prompt": None}),
        ("/ask/head", b"[1"),
        ("/switch", b"[1"),
    ],
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
    assert text.startswith("<!doctype html>")
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    (nonce,) = re.findall(r'<script nonce="(.*?)">', text)
    assert f"script-src 'nonce-{nonce}'" in policy and nonce not in other and text.count("<script") == 1
    assert "http://" not in text and "https://" not in text and "innerHTML" not in text


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", True), ("::", True), ("127.0.0.1", False)])
def test_play_warns_when_other_machines_reach_the_page(
    host: str, warns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(web, "run_app", lambda *args, **kwargs: None)
    assert main(["play", "--plain", "http://a:1", "--head", "http://a:2", "--host", host]) == 0
    error = capsys.readouterr().err
    assert (f"--host {host}" in error and "VLLM_API_KEY" in error) == warns and error.count("\n") == warns


@pytest.mark.parametrize(
    ("template", "plain", "chat", "tokens"),
    [(True, None, True, 512), (False, None, False, 512), (True, GONE, False, None)],
)
def test_settings_carry_the_chat_template_and_the_token_limit_of_the_model(
    template: bool, plain: Side | None, chat: bool, tokens: int | None
) -> None:
    """Without them when the server is gone."""
    status, text = send(Server(template=template), "/settings", plain=plain)
    settings = json.loads(text)
    assert (status, settings["chat"], settings["tokens"]) == (200, chat, tokens)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plain", "http://a:1"], "allowed are two addresses"),
        (["--head", "http://a:1"], "allowed are two addresses"),
        (["--head", "http://a:1", "--head", "folder"], "allowed are two addresses"),
        (["--plain", "http://", "--head", "http://a:1"], "is no address of a server"),
        (["--target", "T"], "--target without --head"),
        (["--head", "no/such"], "no/such"),
    ],
)
def test_invalid_options_are_one_line(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    assert main(["play", *words]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_head_names_are_parsed() -> None:
    assert command.parse_head("http://a:1/v1/") == ("a:1", "http://a:1")
    assert command.parse_head("mine=http://a:1") == ("mine", "http://a:1")
    assert command.parse_head("x/y") == ("y", "x/y") and command.parse_head("n=x/y") == ("n", "x/y")
