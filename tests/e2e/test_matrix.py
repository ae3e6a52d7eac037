"""Request options, all in one batch of one engine per runner and method: the text is plain vLLM's.

Rows are greedy; so sharp (top_k 1, a tiny top_p) that the sampling path must give the greedy token; or drawn with a
seed, whose text is plain vLLM's as well (`mtpc` alone: PTP picks tokens by numbers of its own). Distributions of
sampled text are tested in test_distribution.py and test_grammar_distribution.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.engine import DEMO, Call, Reply, build, run_with_plain
from tests.support.requests import ALL_DRAFTS, EOS, HEADS, ON, SCHEMA, SPEC, same_logprobs

PROMPT = list(b'def read(path):\n    """Return the text of a file."""\n    with open')
WORD = [*range(ord("a"), ord("z") + 1), ord(" ")]
SHORT = {**SCHEMA, "properties": {"size": SCHEMA["properties"]["size"]}, "required": ["size"]}
SHARP, DRAWN = {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "seed": 1}
# each line break makes the next one less likely, until the text ends
END = {"allowed_token_ids": [ord("\n"), EOS], "frequency_penalty": 2.0}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {  # by name: row of the feature page, what a request asks for
    "temperature": ("", {}),
    "top-k": ("top_k", {**SHARP, "top_k": 1}),
    "top-p": ("top_p", {**SHARP, "top_p": 1e-6}),
    "n": ("n > 1", {**SHARP, "top_k": 1, "n": 2}),
    "presence penalty": ("presence penalty", {"presence_penalty": -2.0}),
    "frequency penalty": ("frequency penalty", {"frequency_penalty": 0.9}),
    "repetition penalty": ("repetition penalty", {"repetition_penalty": 1.4}),
    "logprobs": ("logprobs", {"logprobs": 3}),
    "prompt logprobs": ("prompt logprobs", {"prompt_logprobs": 2}),
    "stop": ("stop strings", {"stop": ["th"]}),
    "stop, drawn": ("stop strings", {"stop": [" t", "th"], **DRAWN}),
    "stop_token_ids": ("stop_token_ids", {"stop_token_ids": [ord(" ")]}),
    "stop_token_ids, drawn": ("stop_token_ids", {"stop_token_ids": [ord(" ")], **DRAWN}),
    "min_tokens": ("min_tokens", {"stop_token_ids": [ord(" ")], "min_tokens": 9}),
    "bad_words": ("bad_words", {"bad_words": ["a", "file"]}),
    "allowed_token_ids": ("allowed_token_ids", {"allowed_token_ids": WORD}),
    "end of text": ("ignore_eos, end of text", END),
    "end of text, drawn": ("ignore_eos, end of text", {**END, **DRAWN}),
    "JSON object": ("JSON object", {"structured_outputs": {"json_object": True}}),
    "JSON schema": ("JSON schema", {"structured_outputs": {"json": SHORT}}),
    "JSON schema, drawn": ("JSON schema", {"structured_outputs": {"json": SHORT}, **DRAWN}),
    "regex": ("regex", {"structured_outputs": {"regex": r"\([a-z]{3,5}, [0-9]+\)\n"}}),
    "grammar": ("grammar", {"structured_outputs": {"grammar": 'root ::= "(" [a-z]+ (", " [a-z]+)* ")\\n"'}}),
    "choice": ("choice", {"structured_outputs": {"choice": ["(path) as file", "(name, 'r') as text", "ed"]}}),
}
COLUMNS = [
    pytest.param("v1", "mtpc", marks=ON["mtpc on V1"]),
    pytest.param("v2", "mtpc", marks=ON["mtpc on V2"]),
    pytest.param("v2", "ptp", marks=[pytest.mark.slow, ON["ptp on V2"]]),
]


@pytest.fixture(scope="module")
def outputs() -> Any:
    """Replies of the head and of plain vLLM by runner and method, made on first use."""
    rows = [{"temperature": 0.0, "max_tokens": 20, **row} for _, row in ROWS.values()]
    ending = {"temperature": 0.0, "max_tokens": 8, "allowed_token_ids": [EOS]}
    calls = [Call([PROMPT] * len(rows), rows), Call([PROMPT] * 2, [{**ending, "ignore_eos": True}, ending])]
    arguments: dict[str, Any] = {"max_model_len": 160, "max_num_seqs": 25, "enable_prefix_caching": True}
    # or this small a model fills its answer with blanks
    arguments["structured_outputs_config"] = {"backend": "xgrammar", "disable_any_whitespace": True}

    def of(runner: str, method: str) -> tuple[list[Reply], list[Reply]]:
        spec = SPEC[method] | (ALL_DRAFTS if method == "mtpc" else {})
        return run_with_plain(build(DEMO, HEADS[method], calls, spec=spec, **arguments), runner)

    return cache(of)


@pytest.mark.parametrize(("runner", "method"), COLUMNS)
@pytest.mark.parametrize(
    "row",
    [pytest.param(name, marks=[pytest.mark.feature(row, "exact")] if row else []) for name, (row, _) in ROWS.items()],
)
def test_request_is_answered_as_without_drafts(outputs: Any, runner: str, method: str, row: str) -> None:
    if method == "ptp" and row.endswith("drawn"):
        pytest.skip("PTP's seeded text is its own")
    index = list(ROWS).index(row)
    (ours, *_), (plain, *_) = outputs(runner, method)
    for of in (ours, plain):
        assert len(of.tokens) == len(ROWS)
    assert ours.tokens[index] == plain.tokens[index]
    assert ours.texts[index] == plain.texts[index]
    assert ours.finish[index] == plain.finish[index]
    if row == "logprobs":
        same_logprobs(plain.logprobs[index][0], ours.logprobs[index][0])
    elif row == "prompt logprobs":
        same_logprobs(plain.prompt_logprobs[index], ours.prompt_logprobs[index])


@pytest.mark.parametrize(("runner", "method"), COLUMNS)
def test_every_option_changes_the_text_and_drafts_are_accepted(outputs: Any, runner: str, method: str) -> None:
    """An option that changes nothing would not be tested by the rows above."""
    (ours, *_), (plain, *_) = outputs(runner, method)
    texts = dict(zip(ROWS, (texts[0] for texts in plain.texts), strict=True))
    same = {"temperature", "top-k", "top-p", "n", "logprobs", "prompt logprobs"}
    assert {row for row, text in texts.items() if text == texts["temperature"]} == same
    assert ours.accepted > 20


@pytest.mark.feature("ignore_eos, end of text", "exact")
@pytest.mark.parametrize(("runner", "method"), COLUMNS)
def test_end_of_text_is_ignored_where_a_request_asks_for_it(outputs: Any, runner: str, method: str) -> None:
    ours, plain = (replies[1] for replies in outputs(runner, method))
    assert ours.tokens == plain.tokens == [[[EOS] * 8], [[EOS]]]
