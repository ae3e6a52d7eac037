"""Requests that go on after the end of their grammar, with every backend of vLLM, and grammars that allow no token."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import Call, Engine, run, run_with_plain
from tests.support.requests import ON
from vllm_mtpc import demo

STARTS = ("import os\n\n\ndef walk(path):\n    ", "x = ", "for a in b")
PROMPTS = [list(start.encode()) for start in STARTS]
SHORT = {"structured_outputs": {"regex": "a?b?c?"}, "ignore_eos": True, "max_tokens": 8}
NONE = {"structured_outputs": {"regex": "abc"}, "allowed_token_ids": [ord("z")], "max_tokens": 8, "temperature": 0.0}


def engine(backend: str, is_ours: bool, **options: Any) -> Engine:
    greedy, drawn = {**SHORT, "temperature": 0.0}, {**SHORT, "temperature": 1.0, "seed": 3}
    calls = [Call(PROMPTS, [one] * 3) for one in (greedy, drawn)] + [Call(PROMPTS[:1], [NONE])]
    every = {"num_speculative_tokens_per_batch_size": "off", **options}
    arguments = {"max_model_len": 128, "structured_outputs_config": {"backend": backend}}
    if is_ours:
        arguments["speculative_config"] = {"method": "mtpc", "model": str(demo.path("btree")), **every}
    return Engine(str(demo.path("target")), calls, arguments, "grammars waited for" if is_ours else None)


@pytest.mark.feature("ignore_eos, end of text", "exact")
@pytest.mark.parametrize(
    ("runner", "backend"),
    [
        pytest.param("v1", "xgrammar", marks=ON["mtpc on V1"]),
        pytest.param("v2", "guidance", marks=ON["mtpc on V2"]),
        pytest.param("v1", "guidance", marks=[pytest.mark.slow, ON["mtpc on V1"]]),
        pytest.param("v1", "outlines", marks=[pytest.mark.slow, ON["mtpc on V1"]]),
        pytest.param("v2", "xgrammar", marks=[pytest.mark.slow, ON["mtpc on V2"]]),
        pytest.param("v2", "outlines", marks=[pytest.mark.slow, ON["mtpc on V2"]]),
    ],
)
def test_text_after_the_end_of_a_grammar_is_that_without_drafts(runner: str, backend: str) -> None:
    options = {"min_acceptance": 0} if runner == "v1" else {}
    ours, plain = run_with_plain(engine(backend, True, **options), engine(backend, False), runner)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.finish == theirs.finish
    assert all(len(tokens) == 8 for reply in ours[:2] for (tokens,) in reply.tokens)
    assert ours[1].metrics["vllm:spec_decode_num_accepted_tokens"] > 5
    assert ours[2].finish == [["error"]]


def test_grammar_backend_without_drafts_is_refused() -> None:
    refused = run({"ours": engine("lm-format-enforcer", True)}, "v1", fails=("ours",))["ours"]
    assert "backend='lm-format-enforcer' refuses drafts" in refused
