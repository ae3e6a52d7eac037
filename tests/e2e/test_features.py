"""What a request may ask for besides tokens, with drafts on: structured output, stops, end of text."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.e2e.engine import Call, Engine, Reply, run
from vllm_mtpc import demo

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
TEXT = "import os\n\n\ndef walk(path):\n    "
ENDING = '\n\nif __name__ == "__main__":\n    main()'  # a line break, then often the end of text
EOS = 256


def calls() -> dict[str, Call]:
    prompt, ending = list(TEXT.encode()), list(ENDING.encode())
    grammar = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 100}
    sampled = [{"temperature": 1.0, "seed": seed} for seed in range(4)]
    return {
        "schema": Call([prompt] * 5, [{"temperature": 0.0, **grammar}, *({**one, **grammar} for one in sampled)]),
        "stop string": Call([prompt] * 5, [{"temperature": 0.0}, *sampled]),
        "stop token": Call([prompt] * 5, [{"temperature": 0.0}, *sampled]),
        "end of text": Call(
            [ending] * 32, [{"temperature": 1.0, "seed": seed, "max_tokens": 20} for seed in range(32)]
        ),
    }


def engine(speculative_config: dict[str, Any] | None) -> Engine:
    asked = calls()
    for sampling in asked["stop string"].sampling:
        sampling |= {"stop": [")\n", ":\n"], "max_tokens": 80}
    for sampling in asked["stop token"].sampling:
        sampling |= {"stop_token_ids": [ord("\n")], "max_tokens": 80}
    arguments = {
        "speculative_config": speculative_config,
        "max_model_len": 256,
        # or this small a model fills its answer with blanks
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    return Engine(str(demo.path("target")), list(asked.values()), arguments)


@pytest.fixture(scope="module", params=["v1", "v2"])
def answers(request: pytest.FixtureRequest) -> dict[str, dict[str, Reply]]:
    engines = {"plain": engine(None), "btree": engine({"method": "mtpc", "model": str(demo.path("btree"))})}
    said = run(engines, request.param)
    for name, replies in said.items():
        assert not isinstance(replies, str), (name, replies)
    return {name: dict(zip(calls(), replies, strict=True)) for name, replies in said.items()}


def test_schema_output_is_valid(answers: dict[str, dict[str, Reply]]) -> None:
    reply = answers["btree"]["schema"]
    for texts, finish in zip(reply.texts, reply.finish, strict=True):
        assert finish[0] == "stop"
        jsonschema.validate(json.loads(texts[0]), SCHEMA)
    assert reply.texts[0] == answers["plain"]["schema"].texts[0]


def test_stop_string_does_not_leak(answers: dict[str, dict[str, Reply]]) -> None:
    reply = answers["btree"]["stop string"]
    assert reply.texts[0] == answers["plain"]["stop string"].texts[0]
    assert any(finish[0] == "stop" for finish in reply.finish)
    for texts in reply.texts:
        assert ")\n" not in texts[0] and ":\n" not in texts[0]


def test_stop_token_does_not_leak(answers: dict[str, dict[str, Reply]]) -> None:
    reply = answers["btree"]["stop token"]
    assert reply.tokens[0] == answers["plain"]["stop token"].tokens[0]
    assert any(finish[0] == "stop" for finish in reply.finish)
    for tokens, finish in zip(reply.tokens, reply.finish, strict=True):
        assert ord("\n") not in tokens[0][:-1]
        assert (tokens[0][-1] == ord("\n")) == (finish[0] == "stop")


def test_nothing_follows_the_end_of_text(answers: dict[str, dict[str, Reply]]) -> None:
    for reply in (answers["plain"]["end of text"], answers["btree"]["end of text"]):
        for tokens, finish in zip(reply.tokens, reply.finish, strict=True):
            assert EOS not in tokens[0][:-1]
            assert (tokens[0][-1] == EOS) == (finish[0] == "stop")
    assert any(finish[0] == "stop" for finish in reply.finish)
