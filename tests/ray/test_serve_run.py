"""`serve run` as it stands in the README, with a real engine, and with a key: who has none is answered 401."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from benchmarks.child_process import group
from benchmarks.ray_demo import ENVIRONMENT, PAIRS, is_healthy, wait
from tests.support.clusters import cluster
from tests.support.engine import Call, Engine, run
from tests.support.requests import prompt
from vllm_mtpc import demo
from vllm_mtpc.engine.server import Client, free_port

ROOT = Path(__file__).parents[2]
TARGET, HEAD = str(demo.path("target")), str(demo.path("btree"))
KEY = "sesame"
GREEDY = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
ASKED = [prompt(20, 3 * number) for number in range(4)]
BIN = Path(sys.executable).parent


def typed() -> list[str]:
    """The README's command, its TARGET and HEAD the demo's, one engine in place of two."""
    (line,) = re.findall(r"^serve run vllm_mtpc\.ray_serve:app .*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    words = shlex.split(line)
    assert words[:4] == ["serve", "run", "vllm_mtpc.ray_serve:app", "model=TARGET"] and words[4] == "replicas=2"
    assert json.loads(words[5].partition("=")[2]) == {"method": "mtpc", "model": "HEAD"}
    named = [word.replace("TARGET", TARGET).replace('"HEAD"', json.dumps(HEAD)) for word in words[1:]]
    return [str(BIN / "serve"), *(word.replace("replicas=2", "replicas=1") for word in named)]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of the app, which has a key."""
    log, port = tmp_path_factory.mktemp("serve") / "log", free_port()
    with cluster(cpus=3) as nodes:
        environment = {**os.environ, "RAY_ADDRESS": nodes.address, "VLLM_API_KEY": KEY}
        start = [str(BIN / "serve"), "start", "--proxy-location", "HeadOnly", "--http-port", str(port)]
        subprocess.run([*start, "--http-host", "127.0.0.1"], env=environment, check=True, capture_output=True)
        with group([*typed(), f"env={json.dumps(ENVIRONMENT)}", *PAIRS], log, environment) as process:
            client = Client(port, timeout_s=120)
            wait(lambda: is_healthy(client) and "is ready at" in log.read_text(), 600, process, log)
            yield client


def ask(client: Client, path: str, authorization: str | None, body: dict | None = None) -> tuple[int, dict]:
    headers = {"Content-Type": "application/json"} | ({"Authorization": authorization} if authorization else {})
    connection = HTTPConnection("127.0.0.1", client.port, timeout=120)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read() or b"{}")
    finally:
        connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("authorization", [None, KEY, f"Bearer {KEY}x", "Bearer", f"Basic {KEY}"])
def test_request_without_key_is_refused(client: Client, authorization: str | None) -> None:
    body = {"model": TARGET, "prompt": ASKED[0], **GREEDY}
    for path, asked in (("/v1/models", None), ("/v1/completions", body)):
        status, answer = ask(client, path, authorization, asked)
        assert (status, "choices" in answer or "data" in answer) == (401, False)


@pytest.mark.slow
def test_request_with_key_gets_greedy_text_of_plain_vllm(client: Client) -> None:
    bodies = [{"model": TARGET, "prompt": one, "return_token_ids": True, **GREEDY} for one in ASKED]
    answers = [ask(client, "/v1/completions", f"Bearer {KEY}", body) for body in bodies]
    assert [status for status, _ in answers] == [200] * 4
    assert client.acceptance().accepted_tokens > 0
    arguments = {"max_model_len": 320}
    plain = run({"plain": Engine(TARGET, [Call(ASKED, [GREEDY] * 4)], arguments)}, "v1")["plain"]
    assert not isinstance(plain, str), plain
    assert [body["choices"][0]["token_ids"] for _, body in answers] == [tokens for (tokens,) in plain[0].tokens]
