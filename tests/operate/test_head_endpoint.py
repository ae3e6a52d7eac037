"""POST /mtpc/head and drafts of a request: `vllm serve` over HTTP; who may ask, without it."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.testclient import TestClient

from benchmarks.demo import demo_heads
from tests.e2e.test_servers import CHAT, check_chat
from tests.operate.test_dashboard import EXPRESSIONS
from tests.support import serve
from vllm_mtpc.engine import server
from vllm_mtpc.proposers.options import refusals  # noqa: F401  vLLM's configuration before its entry points
from vllm_mtpc.proposers.patches.endpoint import PATH, HeadEndpoint

KEY = "a-key"
PROMPT = "def read(path):\n    "


class Asking:
    def __init__(self, url: str) -> None:
        self.url = url

    def send(self, path: str, body: Any, key: str | None = KEY) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        content = body if isinstance(body, bytes) else json.dumps(body)
        response = httpx.post(self.url + path, content=content, headers=headers, timeout=120)
        return response.status_code, response.json()

    def answer(self, **more: Any) -> tuple[int, Any]:
        body = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": 200, "ignore_eos": True, **more}
        return self.send("/v1/completions", body)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    words = [str(demo_heads.path("btree")), "--dtype", "float32", "--enforce-eager", *CHAT]
    words += ["--kv-cache-memory-bytes", str(1 << 26), "--max-model-len", "512"]
    log = tmp_path_factory.mktemp("endpoint") / "server.log"
    environment = {"MTPC_ALLOW_HEAD_SWAP": "1", "VLLM_API_KEY": KEY}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "PROGRAM", serve.program())
        with server.run_server(words, log, environment=environment) as made:
            yield Asking(made.url)


@pytest.fixture(scope="module")
def plain(client: Asking) -> str:
    return client.answer(vllm_xargs={"mtpc_drafts": 0})[1]["choices"][0]["text"]


def test_heads_are_swapped_under_requests(client: Asking, plain: str) -> None:
    is_over = threading.Event()

    def ask(_: int) -> list[str]:
        texts = []
        while not is_over.is_set():
            status, answer = client.answer()
            texts.append(answer["choices"][0]["text"] if status == 200 else f"status {status}")
        return texts

    with ThreadPoolExecutor(3) as pool, contextlib.ExitStack() as stack:
        asked = pool.map(ask, range(3))
        stack.callback(is_over.set)
        for name in ("hmm", "cp", "ff", "btree", "hmm"):
            status, answer = client.send("/mtpc/head", {"path": str(demo_heads.path(name))})
            assert (status, answer["circuit"]) == (200, name)
            assert answer["head"] == str(demo_heads.path(name))
    texts = [text for answered in asked for text in answered]
    assert len(texts) >= 3 and set(texts) == {plain}


def test_what_does_not_fit_is_a_400_and_changes_nothing(client: Asking, plain: str) -> None:
    for body, said in {
        json.dumps({"path": str(demo_heads.path("o-ptp"))}).encode(): "is of method 'ptp', not 'mtpc'",
        json.dumps({"path": str(demo_heads.path("target"))}).encode(): "the head is not swapped",
        json.dumps({"path": "no/such/folder"}).encode(): "no/such/folder",
        b'{"path": 7}': '/mtpc/head takes {"path": "HEAD_FOLDER"}',
        b"[]": '/mtpc/head takes {"path": "HEAD_FOLDER"}',
        b"{": '/mtpc/head takes {"path": "HEAD_FOLDER"}',
    }.items():
        status, answer = client.send("/mtpc/head", body)
        assert status == 400 and said in answer["error"]["message"], answer
        assert "\n" not in answer["error"]["message"]
    assert client.answer()[1]["choices"][0]["text"] == plain


def test_it_asks_for_the_key(client: Asking) -> None:
    for key in (None, "another"):
        assert client.send("/mtpc/head", {"path": str(demo_heads.path("cp"))}, key)[0] == 401


def test_drafts_of_one_request(client: Asking, plain: str) -> None:
    status, answer = client.answer(vllm_xargs={"mtpc_drafts": 2})
    assert status == 200 and answer["choices"][0]["text"] == plain
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "vllm_xargs": {"mtpc_drafts": 99}}
    status, answer = client.send("/v1/chat/completions", chat)
    assert status == 400 and "mtpc_drafts=99" in answer["error"]["message"], answer


def test_chat_streams_and_tool_calls_equal_plain(client: Asking) -> None:
    check_chat(client.url, KEY)


def test_every_metric_of_board_and_rules_is_exported(client: Asking) -> None:
    for more in ({"temperature": 1.0}, {"structured_outputs": {"regex": "[a-z]{40,48}"}, "ignore_eos": False}):
        assert client.answer(max_tokens=48, **more)[0] == 200
    text = httpx.get(f"{client.url}/metrics", timeout=60).text
    names = {name for expression in EXPRESSIONS for name in re.findall(r"\bvllm(?:_mtpc)?:\w+(?![\w:])", expression)}
    assert len(names) > 8 and not [name for name in names if f"\n{name}{{" not in text]
    for label in ('by="schedule"', 'by="request"', 'request="greedy"', 'request="sampled"', 'request="structured"'):
        assert re.search(rf"\n\S+{label}\S* [1-9]", text), label


def test_without_permission_there_is_no_such_place() -> None:
    from vllm.entrypoints.launchers import app

    from vllm_mtpc import plugin

    plugin.register()
    assert app.attach_endpoint_plugins.__module__ == "vllm.plugins.endpoint_plugins.interface"
    assert not hasattr(app.attach_endpoint_plugins, "func")  # a patch is a partial around vLLM's own


class Swaps:
    """An endpoint, and what its engine was asked for."""

    def __init__(self, api_key: list[str] | None = None) -> None:
        self.asked: list[str] = []
        endpoint, app = HeadEndpoint(), FastAPI()
        app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])  # vLLM's
        endpoint.attach_router(app)
        endpoint.engine = self
        self.vllm_config = SimpleNamespace(speculative_config=SimpleNamespace(method="mtpc"))
        self.client = TestClient(app)
        if api_key:
            from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

            endpoint.guard = AuthenticationMiddleware(None, api_key)

    async def collective_rpc(self, name: str, args: tuple[str]) -> list[dict[str, str]]:
        assert name == "try_swap_head"
        self.asked.append(args[0])
        return [{"head": args[0]}]

    def post(self, path: str, **headers: str) -> tuple[int, str]:
        given = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
        answer = self.client.post(PATH, content=f'{{"path": "{path}"}}', headers=given)
        body: Any = answer.json()
        return answer.status_code, body["error"]["message"] if "error" in body else body["head"]


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_content_types_are_refused(kind: str) -> None:
    swaps = Swaps()
    status, message = swaps.post(str(demo_heads.path("cp")), Content_Type=kind)
    assert status == 415 and "Content-Type: application/json" in message and swaps.asked == []
    assert swaps.post(str(demo_heads.path("cp")), Content_Type="application/json; charset=utf-8")[0] == 200


def test_web_page_cannot_swap_without_the_key() -> None:
    """vLLM's CORS answers every page's preflight, so the content type alone keeps no page out."""
    page = "http://elsewhere.example"
    asking = {"Origin": page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    swaps = Swaps()
    assert swaps.client.options(PATH, headers=asking).status_code == 200
    assert swaps.post(str(demo_heads.path("cp")), Origin=page)[0] == 403 and swaps.asked == []
    keyed = Swaps([KEY])
    assert keyed.client.post(PATH, json={"path": "x"}, headers={"Origin": page}).status_code == 401
    assert keyed.post(str(demo_heads.path("cp")), Origin=page, Authorization=f"Bearer {KEY}")[0] == 200


def test_name_on_the_hub_is_refused() -> None:
    from vllm_mtpc.errors import ServeConfigError
    from vllm_mtpc.proposers.worker.swap import swap

    config = SimpleNamespace(speculative_config=SimpleNamespace(model_folder="old"), use_v2_model_runner=True)
    with pytest.raises(ServeConfigError, match=r"resolve_head\('someone/head'\) downloads"):
        swap(SimpleNamespace(vllm_config=config, speculator=None), "someone/head")
