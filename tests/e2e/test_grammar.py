"""Drafts are what a grammar allows, more of them are accepted, and the text is the same, on either model runner."""

from __future__ import annotations

import pytest

from tests.e2e.engine import Call, Engine, Reply, run
from tests.e2e.test_features import EOS, SCHEMA
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
GRAMMARS = (
    {"json": SCHEMA},
    {"json": RECORD},
    {"regex": r"(GET|POST) /[a-z]{1,8}(/[a-z]{1,8})? HTTP/1\.[01]"},
    {"choice": ["import os, sys", "import json, os", "return None, None"]},
    {"grammar": 'root ::= "f(" arg (", " arg)* ")"\narg ::= [a-z]{1,6} "=" [0-9]{1,3}'},
)
MORE = 2.4  # tokens/step; measured: 3.73 in place of 1.48 at T=0; at T=1 3.61 in place of 1.44 (V1), 3.82 (V2)


def calls() -> dict[str, Call]:
    asked = [(list(start.encode()), {"structured_outputs": grammar}) for start in STARTS for grammar in GRAMMARS]
    prompts, sampling = [prompt for prompt, _ in asked], [{"max_tokens": 64, **grammar} for _, grammar in asked]
    greedy = [{"temperature": 0.0, **one} for one in sampling]
    drawn = [{"temperature": 1.0, "seed": seed, **one} for seed, one in enumerate(sampling)]
    free = [{"temperature": 0.0, "max_tokens": 16}, {"temperature": 1.0, "max_tokens": 16}]  # beside them, no grammar
    return {
        "greedy": Call([prompts[0], *prompts], [free[0], *greedy]),
        "drawn": Call([prompts[0], *prompts], [free[1], *drawn]),
    }


def engine(plant: str | None = None, drafts: bool = True, **options: object) -> Engine:
    every = {"num_speculative_tokens_per_batch_size": "off", "min_survival": 0}
    spec = {"method": "mtpc", "model": str(demo.path("btree")), **every}
    arguments = {
        "speculative_config": {**spec, **options} if drafts else None,
        "max_model_len": 256,
        "max_num_seqs": 12,  # all at once: interpreted, a step takes as long for few
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    return Engine(str(demo.path("target")), list(calls().values()), arguments, plant)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("v1", marks=pytest.mark.column("mtpc on V1")),
        pytest.param("v2", marks=pytest.mark.column("mtpc on V2")),
    ],
)
def said(request: pytest.FixtureRequest) -> dict[str, dict[str, Reply]]:
    off = engine("noted drafts", mask_drafts=False)
    engines = {"plain": engine(drafts=False), "masked": engine("noted drafts"), "off": off}
    if request.param == "v1":  # which drafts the argmax where it does not mask
        engines["unmasked"] = engine("unmasked drafts")
    replies = run(engines, request.param, async_scheduling=True)
    for name, reply in replies.items():
        assert not isinstance(reply, str), (name, reply)
    by_call = {name: dict(zip(calls(), reply, strict=True)) for name, reply in replies.items()}
    return {"unmasked": by_call["off"], **by_call}


@pytest.mark.feature("JSON schema", "exact")
@pytest.mark.parametrize("name", ["masked", "off", "unmasked"])
def test_greedy_text_is_plain_vllms(said: dict[str, dict[str, Reply]], name: str) -> None:
    assert said[name]["greedy"].tokens == said["plain"]["greedy"].tokens
    assert said[name]["greedy"].finish == said["plain"]["greedy"].finish


@pytest.mark.feature("drafts masked with the grammar", "exact")
def test_every_draft_is_allowed_by_the_grammar(said: dict[str, dict[str, Reply]]) -> None:
    drafts = [noted for reply in said["masked"].values() for noted in reply.recorded]
    assert sum(len(drafted) for drafted, _ in drafts) > 500
    assert all(drafted == valid or valid[-1:] == [EOS] for drafted, valid in drafts)  # V2 drafts on behind the end
    unmasked = [noted for reply in said["off"].values() for noted in reply.recorded]
    assert any(drafted != valid and valid[-1:] != [EOS] for drafted, valid in unmasked), (
        "the test sees forbidden drafts where there are any"
    )


@pytest.mark.feature("drafts masked with the grammar", "exact")
@pytest.mark.parametrize("call", ["greedy", "drawn"])
def test_more_tokens_per_step(said: dict[str, dict[str, Reply]], call: str) -> None:
    """tokens/step = emitted / (emitted - accepted drafts)."""
    found = {}
    for name in ("unmasked", "masked"):
        accepted = {call: reply.metrics["vllm:spec_decode_num_accepted_tokens"] for call, reply in said[name].items()}
        accepted["drawn"] -= accepted["greedy"]  # counters run on from call to call
        emitted = sum(len(samples[0]) for samples in said[name][call].tokens)
        found[name] = emitted / (emitted - accepted[call])
    print(f"{call}: tokens/step {found}")
    assert found["masked"] > found["unmasked"] * MORE
