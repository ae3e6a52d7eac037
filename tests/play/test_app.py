"""What stands between the page and the two servers, against a stand-in for vLLM's API."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from vllm_mtpc.cli import main
from vllm_mtpc.play import command, streams
from vllm_mtpc.play.app import Play, Side

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

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 512}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        assert await request.json() == {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        return web.json_response({}, status=200 if self.template else 400)

    async def metrics(self, request: web.Request) -> web.Response:
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        lines = [f'{name}_total{{position="{k}"}} 1.0' for k in range(7)]
        return web.Response(text=f"# TYPE {name} counter\n" + "\n".join(lines) + "\n")

    async def swap(self, request: web.Request) -> web.Response:
        path = (await request.json())["path"]
        self.asked.append((request.path, path, None))
        if path == "bad":
            return web.json_response({"error": {"message": "the head is not swapped"}}, status=400)
        return web.json_response({"head": path})

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", self.complete), web.post("/v1/chat/completions", self.complete)])
        app.add_routes([web.get("/v1/models", self.models), web.get("/metrics", self.metrics)])
        app.add_routes([web.post("/mtpc/head", self.swap), web.post("/tokenize", self.tokenize)])
        return app


def on_page(server: Server, call: Callable[[aiohttp.ClientSession, str], Any], plain: Side | None = None) -> Any:
    """What `call` returns of a page before this server on both sides."""

    async def run() -> Any:
        runners = []

        async def serve(app: web.Application) -> str:
            runners.append(web.AppRunner(app))
            await runners[-1].setup()
            site = web.TCPSite(runners[-1], "127.0.0.1", 0)
            await site.start()
            return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

        url = await serve(server.app())
        heads = [Side("a", url, "good"), Side("b", url, "bad"), Side("c", url)]
        page = await serve(Play("demo", plain or Side("plain", url), heads, "def ").app())
        try:
            async with aiohttp.ClientSession() as session:
                return await call(session, page)
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(run())


def asking(side: str, **more: Any) -> Callable[[aiohttp.ClientSession, str], Any]:
    async def call(session: aiohttp.ClientSession, page: str) -> list[dict[str, Any]]:
        body = {"prompt": "def ", "temperature": 0, "max_tokens": 9, "seed": 1, "head": 0, **more}
        async with session.post(f"{page}/ask/{side}", json=body) as response:
            return [json.loads(line) for line in (await response.text()).splitlines()]

    return call


def test_chunk_is_one_step() -> None:
    server = Server()
    found = on_page(server, asking("head", drafts=3))
    assert [(one["pieces"], one["tokens"]) for one in found] == [
        (["d"], 1),
        (list("ef re"), 5),
        (["é"], 2),  # two bytes of one letter cannot be told apart
        (["\n"], 1),
    ]
    assert all(before["ms"] < after["ms"] for before, after in pairwise(found))
    path, body, _ = server.asked[-1]
    assert path == "/v1/completions" and body["vllm_xargs"] == {"mtpc_drafts": 3} and body["seed"] == 1
    on_page(server, asking("plain", drafts=3))
    assert "vllm_xargs" not in server.asked[-1][1]


def test_counts_of_the_server_come_last() -> None:
    *_, last = on_page(Server(counts=True), asking("head"))
    assert last == {"steps": 9 - 4, "accepted": [2, 2, 0]}


def test_chat_uses_the_chat_template(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setenv("VLLM_API_KEY", "k")
    on_page(server, asking("head", chat=True))
    path, body, key = server.asked[-1]
    assert (path, key) == ("/v1/chat/completions", "Bearer k")
    assert body["messages"] == [{"role": "user", "content": "def "}] and "prompt" not in body


def test_server_errors_are_shown() -> None:
    (error,) = on_page(Server(), asking("head", drafts=8))
    assert "answers 400: allowed are 0 to 7" in error["error"]

    async def of_nobody(session: aiohttp.ClientSession, page: str) -> None:
        await streams.model_of(session, "http://127.0.0.1:9")

    with pytest.raises(streams.EngineFailed, match=r"http://127.0.0.1:9 is no server with vLLM's OpenAI API"):
        on_page(Server(), of_nobody)


def test_client_disconnect_cancels_request() -> None:
    server = Server()

    async def call(session: aiohttp.ClientSession, page: str) -> None:
        body = {"prompt": "long", "temperature": 0, "max_tokens": 9, "head": 0}
        async with session.post(f"{page}/ask/plain", json=body) as response:
            await response.content.readline()
        for _ in range(200):
            if server.left:
                return
            await asyncio.sleep(0.02)

    on_page(server, call)
    assert server.left == 1


def test_settings_and_switch() -> None:
    async def call(session: aiohttp.ClientSession, page: str) -> Any:
        async with session.get(f"{page}/settings") as response:
            found = [await response.json()]
        for head in (0, 1, 2, 3):
            async with session.post(f"{page}/switch", json={"head": head}) as response:
                found.append((response.status, await response.json()))
        async with session.get(page) as response:
            found.append(await response.text())
        return found

    server = Server()
    settings, good, bad, of_url, unknown, page = on_page(server, call)
    assert settings["heads"] == [{"name": name, "drafts": 7} for name in "abc"] and settings["prompt"] == "def "
    assert good == (200, {"head": "a"}) and of_url == (200, {"head": "c"})
    assert bad == (502, {"error": "the head is not swapped"}) and unknown[0] == 400
    assert [one[1] for one in server.asked] == ["good", "bad"]
    assert page.startswith("<!doctype html>")


def sending(
    method: str, path: str, headers: dict[str, str], data: bytes | None = None
) -> Callable[[aiohttp.ClientSession, str], Any]:
    async def call(session: aiohttp.ClientSession, page: str) -> tuple[int, str]:
        named = {name: value.format(host=urlsplit(page).netloc) for name, value in headers.items()}
        async with session.request(method, page + path, data=data, headers=named) as response:
            return response.status, await response.text()

    return call


JSON = {"Content-Type": "application/json"}
OWN = {**JSON, "Origin": "http://{host}"}
ASK = b'{"prompt": "def ", "temperature": 0, "max_tokens": 9, "head": 0}'
ROUTES = [("POST", "/ask/plain", ASK), ("POST", "/ask/head", ASK), ("POST", "/switch", b'{"head": 0}')]
ROUTES += [("GET", "/settings", None), ("GET", "/", None)]


@pytest.mark.parametrize(("method", "path", "data"), ROUTES)
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
def test_page_refuses_requests_of_other_sites(
    method: str, path: str, data: bytes | None, headers: dict[str, str], status: int
) -> None:
    server = Server()
    assert on_page(server, sending(method, path, headers, data))[0] == status
    assert status == 200 or not server.asked


@pytest.mark.parametrize(("method", "path", "data"), ROUTES[:3])
def test_page_refuses_bodies_without_the_type_of_json(method: str, path: str, data: bytes) -> None:
    """A browser sends text/plain and forms to other sites without asking them first."""
    server = Server()
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        status, text = on_page(server, sending(method, path, {**OWN, "Content-Type": kind}, data))
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
    ],
)
def test_page_answers_400_to_values_out_of_range(path: str, changed: dict[str, Any]) -> None:
    server = Server()
    body = json.dumps({**json.loads(ASK), **changed}).encode()
    status, text = on_page(server, sending("POST", path, OWN, body))
    assert status == 400 and len(json.loads(text)["error"].splitlines()) == 1 and not server.asked
    assert on_page(server, sending("POST", path, OWN, b"[1"))[0] == 400


def test_page_runs_its_own_script_and_no_other() -> None:
    async def call(session: aiohttp.ClientSession, page: str) -> list[tuple[str, str]]:
        found = []
        for _ in range(2):
            async with session.get(page) as response:
                found.append((response.headers["Content-Security-Policy"], await response.text()))
        return found

    (policy, text), (other, _) = on_page(Server(), call)
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


GONE = Side("plain", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("template", "plain", "chat", "tokens"),
    [(True, None, True, 512), (False, None, False, 512), (True, GONE, False, None)],
)
def test_settings_carry_the_chat_template_and_the_token_limit_of_the_model(
    template: bool, plain: Side | None, chat: bool, tokens: int | None
) -> None:
    """Without them when the server is gone."""
    status, text = on_page(Server(template=template), sending("GET", "/settings", {}), plain)
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
