"""What a request may ask for besides tokens, with drafts on: structured output, stops, end of text."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jsonschema
import pytest

from tests.support.engine import Call, Engine, Reply, run
from tests.support.features import RUNNERS
from tests.support.requests import EOS, SCHEMA, TEXT
from vllm_mtpc import demo

SHORT = {**SCHEMA, "properties": {"size": SCHEMA["properties"]["size"]}, "required": ["size"]}  # within LENGTH bytes
LENGTH = 24
ENDING = '\n\nif __name__ == "__main__":\n    main()'  # a line break, then often the end of text
STOP = ord(" ")
# what is asked twice each, greedily and drawn: the prompt, and what it is asked with
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "schema": (TEXT, {"structured_outputs": {"json": SHORT}}),
    "stop string": (TEXT, {"stop": ["urn t", " t"]}),
    "stop token": (TEXT, {"stop_token_ids": [STOP]}),
    # each line break makes the next one less likely, until the text ends
    "end of text": (ENDING, {"allowed_token_ids": [ord("\n"), EOS], "frequency_penalty": 2.0}),
}


def engine(speculative_config: dict[str, Any] | None) -> Engine:
    prompts, sampling = [], []
    for text, asked in ASKED.values():
        prompts += [list(text.encode())] * 2
        how = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 1})
        sampling += [{"max_tokens": LENGTH, **asked, **one} for one in how]
    call = Call(prompts, sampling)
    arguments = {
        "speculative_config": speculative_config,
        "max_model_len": 128,
        # or this small a model fills its answer with blanks
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    return Engine(str(demo.path("target")), [call], arguments)


class Said(NamedTuple):
    """Of one kind of request: greedy, drawn."""

    tokens: list[list[int]]
    texts: list[str]
    finish: list[str]


def by_kind(reply: Reply) -> dict[str, Said]:
    parts = [[one for (one,) in part] for part in (reply.tokens, reply.texts, reply.finish)]
    return {kind: Said(*(part[2 * n : 2 * n + 2] for part in parts)) for n, kind in enumerate(ASKED)}


@pytest.fixture(scope="module", params=RUNNERS)
def answers(request: pytest.FixtureRequest) -> dict[str, dict[str, Said]]:
    engines = {"plain": engine(None), "btree": engine({"method": "mtpc", "model": str(demo.path("btree"))})}
    outputs = run(engines, request.param)
    for name, replies in outputs.items():
        assert not isinstance(replies, str), (name, replies)
    return {name: by_kind(replies[0]) for name, replies in outputs.items()}


@pytest.mark.parametrize("kind", ASKED)
def test_greedy_text_is_plain_vllms(answers: dict[str, dict[str, Said]], kind: str) -> None:
    plain, ours = answers["plain"][kind], answers["btree"][kind]
    assert (ours.tokens[0], ours.texts[0], ours.finish[0]) == (plain.tokens[0], plain.texts[0], plain.finish[0])


@pytest.mark.feature("JSON schema", "exact")
def test_schema_output_is_valid(answers: dict[str, dict[str, Said]]) -> None:
    outputs = answers["btree"]["schema"]
    for text, finish in zip(outputs.texts, outputs.finish, strict=True):
        assert finish == "stop"
        jsonschema.validate(json.loads(text), SHORT)


@pytest.mark.feature("stop strings", "exact")
@pytest.mark.feature("synchronous scheduling", "exact")
def test_stop_string_does_not_leak(answers: dict[str, dict[str, Said]]) -> None:
    outputs = answers["btree"]["stop string"]
    assert "stop" in outputs.finish
    assert not any(stop in text for text in outputs.texts for stop in ASKED["stop string"][1]["stop"])


@pytest.mark.feature("stop_token_ids", "exact")
def test_stop_token_does_not_leak(answers: dict[str, dict[str, Said]]) -> None:
    outputs = answers["btree"]["stop token"]
    assert "stop" in outputs.finish
    for tokens, finish in zip(outputs.tokens, outputs.finish, strict=True):
        assert STOP not in tokens[:-1]
        assert (tokens[-1] == STOP) == (finish == "stop")


@pytest.mark.feature("ignore_eos, end of text", "exact")
def test_nothing_follows_the_end_of_text(answers: dict[str, dict[str, Said]]) -> None:
    assert answers["btree"]["end of text"].finish == ["stop", "stop"]
    for outputs in (answers["plain"]["end of text"], answers["btree"]["end of text"]):
        for tokens, finish in zip(outputs.tokens, outputs.finish, strict=True):
            assert EOS not in tokens[:-1]
            assert (tokens[-1] == EOS) == (finish == "stop")
