"""`vllm serve` of a head over HTTP: another head by POST, drafts by request, and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from vllm_mtpc import demo
from vllm_mtpc.engine import server

KEY = "a-key"
PROMPT = "def read(path):\n    "
LENGTH = 200


class Asking(server.Client):
    """With the API key."""

    def send(self, path: str, body: Any, key: str | None = KEY) -> tuple[int, Any]:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        content = body if isinstance(body, bytes) else json.dumps(body)
        response = httpx.post(self.url + path, content=content, headers=headers, timeout=120)
        return response.status_code, response.json()

    def answer(self, **more: Any) -> tuple[int, Any]:
        body = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": LENGTH, "ignore_eos": True, **more}
        return self.send("/v1/completions", body)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asking]:
    words = [str(demo.path("btree")), "--dtype", "float32", "--enforce-eager", "--served-model-name", "m"]
    words += ["--kv-cache-memory-bytes", str(1 << 26), "--max-model-len", "512"]
    words += ["--chat-template", "{{ messages[0].content }}"]
    log = tmp_path_factory.mktemp("endpoint") / "server.log"
    environment = {"MTPC_ALLOW_HEAD_SWAP": "1", "VLLM_API_KEY": KEY}
    with server.run_server(words, log, environment=environment) as made:
        yield Asking(made.port)


@pytest.fixture(scope="module")
def plain(client: Asking) -> str:
    """The text without drafts."""
    return client.answer(vllm_xargs={"mtpc_drafts": 0})[1]["choices"][0]["text"]


def test_heads_are_swapped_under_requests(client: Asking, plain: str) -> None:
    texts: list[str] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            status, answer = client.answer()
            texts.append(answer["choices"][0]["text"] if status == 200 else f"status {status}")

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for name in ("hmm", "cp", "ff", "btree", "hmm"):
            status, answer = client.send("/mtpc/head", {"path": str(demo.path(name))})
            assert (status, answer["circuit"]) == (200, name)
            assert answer["head"] == str(demo.path(name))
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert len(texts) >= 3 and set(texts) == {plain}


def test_what_does_not_fit_is_a_400_and_changes_nothing(client: Asking, plain: str) -> None:
    for body, said in {
        json.dumps({"path": str(demo.path("o-ptp"))}).encode(): "is of method 'ptp', not 'mtpc'",
        json.dumps({"path": str(demo.path("target"))}).encode(): "the head is not swapped",
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
        assert client.send("/mtpc/head", {"path": str(demo.path("cp"))}, key)[0] == 401


def test_drafts_of_one_request(client: Asking, plain: str) -> None:
    for drafts in (2, 7):
        status, answer = client.answer(vllm_xargs={"mtpc_drafts": drafts})
        assert status == 200 and answer["choices"][0]["text"] == plain
    for bad in (-1, 8, "many", 1.5):
        status, answer = client.answer(vllm_xargs={"mtpc_drafts": bad})
        assert status == 400 and "mtpc_drafts=" in answer["error"]["message"], answer
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "vllm_xargs": {"mtpc_drafts": 99}}
    status, answer = client.send("/v1/chat/completions", chat)
    assert status == 400 and "mtpc_drafts=99" in answer["error"]["message"], answer


def test_without_permission_there_is_no_such_place() -> None:
    from vllm.entrypoints.launchers import app

    from vllm_mtpc import plugin

    plugin.register()
    assert app.attach_endpoint_plugins.__module__ == "vllm.plugins.endpoint_plugins.interface"
    assert not hasattr(app.attach_endpoint_plugins, "func")  # a patch is a partial around vLLM's own
