"""`vllm serve` with a head: text is plain vLLM's, chat streams equal whole answers, a dead process ends the server."""

from __future__ import annotations

import http.client
import json
import re
import shutil
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

from benchmarks.child_process import tail
from tests.support import forks
from tests.support.engine import DEMO, ask, build, run
from tests.support.requests import COLUMNS, HEADS, ON, SCHEMA, SPEC
from vllm_mtpc.engine.server import Client, run_server
from vllm_mtpc.errors import EngineFailed

PROMPTS = [list(text) for text in (b"import os\n", b"def read(path):\n    ", b"class Node:\n", b"for i in range(")] * 2
TWO_THREADS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "TORCHDYNAMO_DISABLE": "1"}
PATIENCE_S = 120.0

TEMPLATE = "{% for message in messages %}# {{ message.content }}\n{% endfor %}{{ 'call = ' if tools else 'def ' }}"
MESSAGES = [{"role": "user", "content": "Walk through a folder."}]
TOOL = {"type": "function", "function": {"name": "record", "description": "Keep it.", "parameters": SCHEMA}}
STRICT = {**TOOL, "function": {**TOOL["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "record"}}


def serve(
    folder: Path, words: list[str], runner: str = "v1", target: Path = DEMO / "target", **environment: str
) -> AbstractContextManager[Client]:
    size = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4"]
    size += ["--kv-cache-memory-bytes", str(1 << 26)]
    return run_server([str(target), *size, *words], folder / "log", forks.ENVIRONMENTS[runner] | environment)


def drafting(method: str) -> list[str]:
    return ["--speculative-config", json.dumps({**SPEC[method], "model": str(DEMO / HEADS[method])})]


DATA = pytest.mark.feature("data parallel", "exact")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("runner", "method", "engines"),
    [
        pytest.param("v1", "mtpc", "01", marks=[DATA, ON["mtpc on V1"]]),
        pytest.param("v2", "mtpc", "01", marks=[DATA, ON["mtpc on V2"]]),
        pytest.param("v2", "ptp", "01", marks=[DATA, ON["ptp on V2"]]),
        pytest.param("v1", None, "0", id="bundled head"),  # no option about drafts
    ],
)
def test_every_engine_drafts_and_text_is_plain_vllms(
    runner: str, method: str | None, engines: str, tmp_path: Path
) -> None:
    words, target, environment = ["--data-parallel-size", "2", "--api-server-count", "1"], DEMO / "target", TWO_THREADS
    if method is None:
        target = Path(shutil.copytree(target, tmp_path / "shipping"))
        shutil.copytree(DEMO / "btree", target / "mtpc")
        environment = {"MTPC_AUTO": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    words = drafting(method) + words if method else []
    (call,) = calls = [ask(PROMPTS, 48)]
    with serve(tmp_path, words, runner, target, **environment) as client, ThreadPoolExecutor(len(PROMPTS)) as pool:
        bodies = [
            {"model": client.model(), "prompt": prompt, **sampling}
            for prompt, sampling in zip(PROMPTS, call.sampling, strict=True)
        ]
        outputs = list(pool.map(client.complete, bodies))
        metrics = client.get("/metrics", timeout_s=30)[1]
    plain = run({"plain": build(DEMO, None, calls, max_model_len=256)}, runner)["plain"]
    assert outputs == plain[0].tokens
    accepted = dict(re.findall(r'^vllm:spec_decode_num_accepted_tokens_total\{engine="(\d)".*\} (\S+)$', metrics, re.M))
    assert accepted.keys() == set(engines) and min(map(float, accepted.values())) > 0
    assert ("Serving with the head that" in (tmp_path / "log").read_text()) == (method is None)


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


@pytest.mark.feature("chat, streaming, tool calls", "exact")
@pytest.mark.parametrize(("runner", "method"), COLUMNS)
def test_chat_streams_and_tool_calls_equal_plain(runner: str, method: str, tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    words = ["--chat-template", str(tmp_path / "template.jinja"), "--enable-auto-tool-choice"]
    words += ["--tool-call-parser", "hermes", "--served-model-name", "m"]
    words += ["--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}']
    with serve(tmp_path, drafting(method) + words, runner) as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=600, max_retries=0)
        chat, text, _ = answer(client)
        _, _, arguments = answer(client, tools=[TOOL], tool_choice=NAMED)
        # the penalty: or this small a model goes on with blanks, which the grammar of a required call allows
        one = {"parallel_tool_calls": False, "max_tokens": 160, "frequency_penalty": 1.0}
        _, _, required = answer(client, tools=[STRICT], tool_choice="required", **one)
    assert json.loads(arguments)  # vLLM holds a named tool to JSON; what is in it is up to this small a model
    jsonschema.validate(json.loads(required), SCHEMA)
    (plain,) = run({"plain": build(DEMO, None, [ask([chat], 80, ignore_eos=False)], max_model_len=256)}, "v1")["plain"]
    assert plain.texts == [[text]]


def wait(what: str, log: Path, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, f"{what}: not within {PATIENCE_S:.0f} s; the log ends with\n{tail(log)}"
        time.sleep(0.2)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "victim"), [(1, "EngineCore"), (2, "Worker_TP1")])
def test_killed_process_fails_requests_and_ends_the_server(ranks: int, victim: str, tmp_path: Path) -> None:
    log, words = tmp_path / "log", [*drafting("mtpc"), "--tensor-parallel-size", str(ranks)]
    environment = TWO_THREADS | {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(ranks)))}
    long = {"prompt": list(b"import os\n"), "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
    with serve(tmp_path, words, **environment) as client, ThreadPoolExecutor(2) as pool:
        server = psutil.Process(client.process)
        below = server.children(recursive=True)
        (process,) = [child for child in below if victim in "".join(child.cmdline())]
        asked = [pool.submit(client.complete, {"model": client.model(), **long}) for _ in range(2)]
        wait("drafts", log, lambda: client.acceptance().drafts > 20)
        process.kill()
        for future in asked:
            with pytest.raises((EngineFailed, OSError, http.client.HTTPException)):
                future.result(timeout=PATIENCE_S)
        wait("the server's end", log, lambda: all(map(has_ended, (server, *below))))
    assert "EngineDeadError" in log.read_text(errors="replace")
