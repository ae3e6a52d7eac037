"""Chat over HTTP with drafts: streams equal whole answers, tools are called with JSON, text is plain vLLM's."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.support import forks
from tests.support.engine import Call, Engine, run
from tests.support.requests import COLUMNS, METHODS, SCHEMA
from vllm_mtpc import demo

TEMPLATE = "{% for message in messages %}# {{ message.content }}\n{% endfor %}{{ 'call = ' if tools else 'def ' }}"
MESSAGES = [{"role": "user", "content": "Walk through a folder."}]
TOOL = {"type": "function", "function": {"name": "record", "description": "Keep it.", "parameters": SCHEMA}}
STRICT = {**TOOL, "function": {**TOOL["function"], "strict": True}}
NAMED = {"type": "function", "function": {"name": "record"}}
ENGINE = {"max_model_len": 256, "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}


@contextmanager
def server(runner: str, method: str, folder: Path) -> Iterator[openai.OpenAI]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = METHODS[runner][method]
    spec = {**options, "model": str(demo.path(options["model"]))}
    (folder / "template.jinja").write_text(TEMPLATE)
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(demo.path("target")),
        "--dtype",
        "float32",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m", "--enforce-eager"]
    command += ["--max-model-len", str(ENGINE["max_model_len"]), "--kv-cache-memory-bytes", str(1 << 26)]
    command += ["--structured-outputs-config", json.dumps(ENGINE["structured_outputs_config"])]
    command += ["--chat-template", str(folder / "template.jinja"), "--enable-auto-tool-choice"]
    command += ["--tool-call-parser", "hermes", "--speculative-config", json.dumps(spec)]
    env = {**os.environ, **forks.ENVIRONMENTS[runner]}
    log = folder / "log"
    with open(log, "wb") as written, subprocess.Popen(command, stdout=written, stderr=written, env=env) as process:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600, max_retries=0)
        try:
            wait(client, process, log)
            yield client
        finally:
            process.terminate()
            process.wait(60)


def wait(client: openai.OpenAI, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1200):
        try:
            client.models.list()
            return
        except openai.APIConnectionError:
            if process.poll() is not None:
                break
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-4000:])


def asked(client: openai.OpenAI, **more: Any) -> tuple[list[int], str, str]:
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
    with server(runner, method, tmp_path) as client:
        chat, text, _ = asked(client)
        _, _, arguments = asked(client, tools=[TOOL], tool_choice=NAMED)
        # the penalty: or this small a model goes on with blanks, which the grammar of a required call allows
        one = {"parallel_tool_calls": False, "max_tokens": 160, "frequency_penalty": 1.0}
        _, _, required = asked(client, tools=[STRICT], tool_choice="required", **one)
    assert json.loads(arguments)  # vLLM holds a named tool to JSON; what is in it is up to this small a model
    jsonschema.validate(json.loads(required), SCHEMA)
    calls = [Call([chat], [{"temperature": 0.0, "max_tokens": 80}])]
    plain = run({"plain": Engine(str(demo.path("target")), calls, ENGINE)}, "v1")["plain"]
    assert plain[0].texts == [[text]]
