"""`vllm serve` with a head: drafts of one request, chat, and the metrics of the board and the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.demo import demo_heads
from tests.e2e.test_servers import CHAT, check_chat
from tests.operate.test_dashboard import EXPRESSIONS
from tests.support import serve
from vllm_mtpc.engine import server


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.VllmServer]:
    words = [str(demo_heads.path("btree")), "--dtype", "float32", "--enforce-eager", *CHAT]
    words += ["--kv-cache-memory-bytes", str(1 << 26), "--max-model-len", "512"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "PROGRAM", serve.program())
        with server.run_server(words, tmp_path_factory.mktemp("server") / "log") as made:
            yield made


def text_of(client: server.VllmServer, **more: Any) -> str:
    body = {"model": "m", "prompt": "def read(path):\n    ", "temperature": 0, "max_tokens": 48, "ignore_eos": True}
    answer = client.send("/v1/completions", body | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_drafts_of_one_request(client: server.VllmServer) -> None:
    plain, few, all_ = (text_of(client, vllm_xargs={"mtpc_drafts": drafts}, max_tokens=200) for drafts in (0, 2, 7))
    assert plain == few == all_
    chat = {"model": "m", "messages": [{"role": "user", "content": "a"}], "vllm_xargs": {"mtpc_drafts": 99}}
    answer = client.send("/v1/chat/completions", chat)
    assert answer.status_code == 400 and "mtpc_drafts=99" in answer.json()["error"]["message"], answer.text


def test_chat_streams_and_tool_calls_equal_plain(client: server.VllmServer) -> None:
    check_chat(client.url)


def test_every_metric_of_board_and_rules_is_exported(client: server.VllmServer) -> None:
    text_of(client, temperature=1.0)
    text_of(client, structured_outputs={"regex": "[a-z]{40,48}"}, ignore_eos=False)
    text_of(client, vllm_xargs={"mtpc_drafts": 2})
    text = client.send("/metrics").text
    names = {name for expression in EXPRESSIONS for name in re.findall(r"\bvllm(?:_mtpc)?:\w+(?![\w:])", expression)}
    assert len(names) > 8 and not [name for name in names if f"\n{name}{{" not in text]
    for label in ('by="schedule"', 'by="request"', 'request="greedy"', 'request="sampled"', 'request="structured"'):
        assert re.search(rf"\n\S+{label}\S* [1-9]", text), label
