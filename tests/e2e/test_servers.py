"""`vllm serve` with a head: text is plain vLLM's, chat streams equal whole answers, a dead process ends the server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jsonschema
import openai
import psutil
import pytest

from benchmarks.demo import demo_heads
from tests.support import forks
from tests.support.engine import DEMO, TWO_RANKS, ask, build, run
from tests.support.requests import COLUMNS, HEADS, SCHEMA, SPEC
from vllm_mtpc.engine.server import VllmServer, run_server
from vllm_mtpc.errors import EngineFailed

PROMPTS = [list(text) for text in (b"import os\n", b"def read(path):\n    ", b"class Node:\n", b"for i in range(")] * 2
PATIENCE_S = 120.0

TEMPLATE = "{% for message in messages %}# {{ message.content }}\n{% endfor %}{{ 'call = ' if tools else 'def ' }}"
MESSAGES = [{"role": "user", "content": "Walk through a folder."}]
RECORD = {"name": "record", "description": "Keep it.", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": RECORD}
NAMED = {"type": "function", "function": {"name": "record"}}


def serve(
    folder: Path, runner: str, method: str, *words: str, **environment: str
) -> AbstractContextManager[VllmServer]:
    size = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4"]
    size += ["--kv-cache-memory-bytes", str(1 << 26)]
    spec = json.dumps({**SPEC[method], "model": str(demo_heads.path(HEADS[method]))})
    command = [str(DEMO / "target"), *size, "--speculative-config", spec, *words]
    return run_server(command, folder / "log", forks.ENVIRONMENTS[runner] | environment)


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "method"), COLUMNS)
def test_both_engines_draft_and_text_is_plain_vllms(runner: str, method: str, tmp_path: Path) -> None:
    words, call = ["--data-parallel-size", "2", "--api-server-count", "1"], ask(PROMPTS, 48)
    with serve(tmp_path, runner, method, *words, **TWO_RANKS) as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
        asked = zip(PROMPTS, call.sampling, strict=True)
        bodies = [{"model": client.model_card()["id"], "prompt": prompt, **sampling} for prompt, sampling in asked]
        outputs = list(pool.map(client.complete, bodies))
        metrics = client.send("/metrics", timeout_s=30).text
    (plain,) = run({"plain": build(DEMO, None, [call], max_model_len=256)}, runner)["plain"]
    assert outputs == plain.tokens
    accepted = dict(re.findall(r'^vllm:spec_decode_num_accepted_tokens_total\{engine="(\d)".*\} (\S+)$', metrics, re.M))
    assert accepted.keys() == set("01") and min(map(float, accepted.values())) > 0


def answer(client: openai.OpenAI, **more: Any) -> tuple[list[int], str, str]:
    """Prompt, text and arguments of the tool call of a whole answer, after checking that its stream is equal."""
    given = {"model": "m", "messages": MESSAGES, "temperature": 0, "max_tokens": 80, **more}
    whole = client.chat.completions.create(**given, extra_body={"return_token_ids": True})
    message = whole.choices[0].message
    text = message.content or ""
    arguments = "".join(call.function.arguments for call in message.tool_calls or [])
    deltas = [part.choices[0].delta for part in client.chat.completions.create(**given, stream=True) if part.choices]
    assert "".join(delta.content or "" for delta in deltas) == text
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    streamed = "".join(call.function.arguments or "" for call in calls)
    assert streamed == arguments or json.loads(streamed) == json.loads(arguments)  # vLLM lays out a whole call again
    return whole.prompt_token_ids, text, arguments


CHAT = ["--chat-template", TEMPLATE, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
CHAT += ["--served-model-name", "m"]
CHAT += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']


def check_chat(url: str) -> None:
    """Streams and tool calls of a server started with the words CHAT equal whole answers, and these plain vLLM's."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)
    chat, text, _ = answer(client)
    # the penalty: or this small a model goes on with blanks, which the grammar of a call allows
    one = {"parallel_tool_calls": False, "max_tokens": 160, "frequency_penalty": 1.0}
    for choice in (NAMED, "required"):
        _, _, arguments = answer(client, tools=[TOOL], tool_choice=choice, **one)
        jsonschema.validate(json.loads(arguments), SCHEMA)
    (plain,) = run({"plain": build(DEMO, None, [ask([chat], 80, ignore_eos=False)], max_model_len=256)}, "v1")["plain"]
    assert plain.texts == [[text]]


@pytest.mark.slow  # tests/operate/test_running_server.py asks its own server the same, V1 with `mtpc`
@pytest.mark.parametrize(("runner", "method"), COLUMNS)
def test_chat_streams_and_tool_calls_equal_plain(runner: str, method: str, tmp_path: Path) -> None:
    with serve(tmp_path, runner, method, *CHAT) as served:
        check_chat(served.url)


def running() -> set[psutil.Process]:
    return {one for one in psutil.process_iter(["status"]) if one.info["status"] != psutil.STATUS_ZOMBIE}


def wait(is_so: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-2000:]
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "victim"), [(1, "EngineCore"), (2, "Worker_TP1")])
def test_killed_process_fails_requests_and_ends_the_server(ranks: int, victim: str, tmp_path: Path) -> None:
    log, words = tmp_path / "log", ["--tensor-parallel-size", str(ranks)]
    environment = TWO_RANKS | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}
    long = {"prompt": list(b"import os\n"), "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
    with serve(tmp_path, "v1", "mtpc", *words, **environment) as client, ThreadPoolExecutor(2) as pool:
        server = psutil.Process(client.process.pid)
        below = server.children(recursive=True)
        (process,) = [child for child in below if victim in "".join(child.cmdline())]
        asked = [pool.submit(client.complete, {"model": client.model_card()["id"], **long}) for _ in range(2)]
        wait(lambda: client.acceptance().drafts > 20, log)
        process.kill()
        for future in asked:
            with pytest.raises(EngineFailed):
                future.result(timeout=PATIENCE_S)
        wait(lambda: not {server, *below} & running(), log)
    assert "EngineDeadError" in log.read_text(errors="replace")
