"""Drafts are what a grammar allows, more of them are accepted, and the text is the same, on either model runner."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from tests.support import forks
from tests.support.distributions import asking
from tests.support.engine import Call, Engine, Reply, run
from tests.support.features import RUNNERS
from tests.support.requests import EOS, SCHEMA
from vllm_mtpc import demo

STARTS = ("import os\n\n\ndef walk(path):\n    ", "import json\n\nconfig = ")
RECORD = {
    "type": "object",
    "properties": {
        "mode": {"enum": ["read", "write", "append"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 3},
    },
    "required": ["mode", "count", "tags"],
    "additionalProperties": False,
}
LINE, CHOICES = (
    r"(GET|POST) /[a-z]{1,8}(/[a-z]{1,8})? HTTP/1\.[01]",
    ["import os, sys", "import json, os", "return None, None"],
)
GRAMMARS = (
    {"json": SCHEMA},
    {"json": RECORD},
    {"regex": LINE},
    {"choice": CHOICES},
    {"grammar": 'root ::= "f(" arg (", " arg)* ")"\narg ::= [a-z]{1,6} "=" [0-9]{1,3}'},
)
# with patterns: what xgrammar takes for a string of bounded length may have control characters, which JSON has not
WORDS = [
    {**SCHEMA, "properties": {**SCHEMA["properties"], "name": {"type": "string", "pattern": "^[a-z]{1,8}$"}}},
    {
        **RECORD,
        "properties": {
            **RECORD["properties"],
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,6}$"}, "maxItems": 3},
        },
    },
]
MORE = 2.4  # tokens/step; measured: 3.73 in place of 1.48 at T=0; at T=1 4.11 in place of 1.37 (V1), 3.73 of 1.41 (V2)


def calls() -> dict[str, Call]:
    asked = [(list(start.encode()), {"structured_outputs": grammar}) for start in STARTS for grammar in GRAMMARS]
    prompts, sampling = [prompt for prompt, _ in asked], [{"max_tokens": 64, **grammar} for _, grammar in asked]
    greedy = [{"temperature": 0.0, **one} for one in sampling]
    drawn = [{"temperature": 1.0, "seed": seed, **one} for seed, one in enumerate(sampling)]
    free = [{"temperature": 0.0, "max_tokens": 16}, {"temperature": 1.0, "max_tokens": 16}]  # next to them, no grammar
    return {
        "greedy": Call([prompts[0], *prompts], [free[0], *greedy]),
        "drawn": Call([prompts[0], *prompts], [free[1], *drawn]),
    }


def engine(injected: str | None = None, drafts: bool = True, **options: object) -> Engine:
    every = {"num_speculative_tokens_per_batch_size": "off", "min_acceptance": 0}
    spec = {"method": "mtpc", "model": str(demo.path("btree")), **every}
    arguments = {
        "speculative_config": {**spec, **options} if drafts else None,
        "max_model_len": 256,
        "max_num_seqs": 12,  # all at once: interpreted, a step takes as long for few
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    return Engine(str(demo.path("target")), list(calls().values()), arguments, injected)


@pytest.fixture(scope="module", params=RUNNERS)
def outputs(request: pytest.FixtureRequest) -> dict[str, dict[str, Reply]]:
    off = engine("noted drafts", mask_drafts=False)
    engines = {"plain": engine(drafts=False), "masked": engine("noted drafts"), "off": off}
    engines["pending"] = engine("grammars never compiled")
    if request.param == "v1":  # which drafts the argmax where it does not mask
        engines["unmasked"] = engine("unmasked drafts")
    replies = run(engines, request.param, async_scheduling=True)
    by_call = {name: dict(zip(calls(), reply, strict=True)) for name, reply in replies.items()}
    return {"unmasked": by_call["off"], **by_call}


@pytest.mark.feature("JSON schema", "exact")
@pytest.mark.parametrize("name", ["masked", "off", "unmasked", "pending"])
def test_greedy_text_is_plain_vllms(outputs: dict[str, dict[str, Reply]], name: str) -> None:
    assert outputs[name]["greedy"].tokens == outputs["plain"]["greedy"].tokens
    assert outputs[name]["greedy"].finish == outputs["plain"]["greedy"].finish


@pytest.mark.feature("drafts masked with the grammar", "exact")
def test_masked_drafts_are_allowed_by_the_grammar(outputs: dict[str, dict[str, Reply]]) -> None:
    drafts = [noted for reply in outputs["masked"].values() for noted in reply.recorded]
    assert sum(len(drafted) for drafted, _ in drafts) > 500
    assert all(drafted == valid or valid[-1:] == [EOS] for drafted, valid in drafts)  # V2 drafts past the end
    unmasked = [noted for reply in outputs["off"].values() for noted in reply.recorded]
    assert any(drafted != valid and valid[-1:] != [EOS] for drafted, valid in unmasked), (
        "the test sees forbidden drafts where there are any"
    )


@pytest.mark.feature("drafts masked with the grammar", "exact")
@pytest.mark.parametrize("call", ["greedy", "drawn"])
def test_masked_drafts_raise_tokens_per_step(outputs: dict[str, dict[str, Reply]], call: str) -> None:
    """tokens/step = emitted / (emitted - accepted drafts)."""
    found = {}
    for name in ("unmasked", "masked"):
        accepted = {
            call: reply.metrics["vllm:spec_decode_num_accepted_tokens"] for call, reply in outputs[name].items()
        }
        accepted["drawn"] -= accepted["greedy"]  # counters run on from call to call
        emitted = sum(len(samples[0]) for samples in outputs[name][call].tokens)
        found[name] = emitted / (emitted - accepted[call])
    print(f"{call}: tokens/step {found}")
    assert found["masked"] > found["unmasked"] * MORE


def is_valid(text: str, finish: str | None, grammar: dict[str, object]) -> bool:
    """Whether an answer is a whole one of its grammar; only EBNF has no end here within max_tokens."""
    kind, given = next(iter(grammar.items()))
    if kind == "json":
        return finish == "stop" and jsonschema.Draft202012Validator(given).is_valid(json.loads(text))
    if kind == "grammar":
        return re.match(r"f\([a-z]{1,6}=[0-9]", text) is not None
    return finish == "stop" and (text in CHOICES if kind == "choice" else re.fullmatch(LINE, text) is not None)


@pytest.mark.parametrize("name", ["masked", "off"])
def test_answers_are_valid(outputs: dict[str, dict[str, Reply]], name: str) -> None:
    for reply in outputs[name].values():
        answers = zip(reply.texts[1:], reply.finish[1:], GRAMMARS * len(STARTS), strict=True)
        invalid = [(text, grammar) for (text,), (finish,), grammar in answers if not is_valid(text, finish, grammar)]
        assert not invalid


@pytest.mark.feature("JSON schema", "exact")
@pytest.mark.slow
@pytest.mark.parametrize(
    "runner",
    [
        pytest.param("v1", marks=pytest.mark.column("mtpc on V1")),
        pytest.param("v2", marks=pytest.mark.column("mtpc on V2")),
    ],
)
def test_ten_thousand_answers_are_valid(runner: str) -> None:
    """10,000 drawn answers, 32 in flight; where kernels are interpreted 200."""
    count = 200 if runner == "v2" and not forks.ON_GPU else 10_000
    parts = [
        asking(list(start.encode()), {"max_tokens": 96, "structured_outputs": {"json": schema}}, count // 4)
        for start in STARTS
        for schema in WORDS
    ]
    call = Call([one for part in parts for one in part.prompts], [one for part in parts for one in part.sampling])
    asked = engine()
    asked.calls, asked.arguments["max_num_seqs"] = [call], 32
    (reply,) = run({"many": asked}, runner, async_scheduling=True)["many"]
    answers = [
        (text, finish, sampling["structured_outputs"])
        for texts, finishes, sampling in zip(reply.texts, reply.finish, call.sampling, strict=True)
        for text, finish in zip(texts, finishes, strict=True)
    ]
    invalid = [text for text, finish, grammar in answers if not is_valid(text, finish, grammar)]
    emitted = sum(len(tokens) for samples in reply.tokens for tokens in samples)
    steps = emitted - reply.metrics["vllm:spec_decode_num_accepted_tokens"]
    print(f"{runner}: {len(answers)} answers, {len(invalid)} invalid, {emitted / steps:.3f} tokens/step")
    assert len(answers) == count and not invalid
