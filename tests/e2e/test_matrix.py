"""What a request may ask for, all in one batch of one engine per runner and method: the text is plain vLLM's.

Rows are greedy, or so sharp (top_k 1, a tiny top_p) that the sampling path must give the greedy token. Distributions
of sampled
text are checked elsewhere (test_distribution.py, test_ptp.py, test_grammar_distribution.py); `features.py` has the
whole matrix.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import Call, Engine, Reply, run
from tests.support.requests import ACCEPTED, COLUMNS, EOS, METHODS, same_logprobs
from vllm_mtpc import demo

PROMPT = list(b'def read(path):\n    """Return the text of a file."""\n    with open')
WORD = [*range(ord("a"), ord("z") + 1), ord(" ")]
SHARP = {"temperature": 0.8, "seed": 3}
ROWS: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top-k": {**SHARP, "top_k": 1},
    "top-p": {**SHARP, "top_p": 1e-6},
    "n": {**SHARP, "top_k": 1, "n": 2},
    "presence penalty": {"presence_penalty": -2.0},
    "frequency penalty": {"frequency_penalty": 0.9},
    "repetition penalty": {"repetition_penalty": 1.4},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2},
    "stop": {"stop": ["th"]},
    "stop_token_ids": {"stop_token_ids": [ord(" ")]},
    "min_tokens": {"stop_token_ids": [ord(" ")], "min_tokens": 9},
    "bad_words": {"bad_words": ["a", "file"]},
    "allowed_token_ids": {"allowed_token_ids": WORD},
    "JSON object": {"structured_outputs": {"json_object": True}},
    "regex": {"structured_outputs": {"regex": r"\([a-z]{3,5}, [0-9]+\)\n"}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "(" [a-z]+ (", " [a-z]+)* ")\\n"'}},
    "choice": {"structured_outputs": {"choice": ["(path) as file", "(name, 'r') as text", "ed"]}},
}
# rows of docs/features.md, where they have another name
NAMES = {"top-k": "top_k", "top-p": "top_p", "n": "n > 1", "stop": "stop strings"}
NAMED = [
    pytest.param(row, marks=pytest.mark.feature(NAMES.get(row, row), "exact")) for row in ROWS if row != "temperature"
]


def calls() -> list[Call]:
    rows = [{"temperature": 0.0, "max_tokens": 20, **row} for row in ROWS.values()]
    ending = {"temperature": 0.0, "max_tokens": 8, "allowed_token_ids": [EOS]}
    return [
        Call([PROMPT] * len(rows), rows),
        Call([PROMPT] * 2, [{**ending, "ignore_eos": True}, ending]),
    ]


def engine(options: dict[str, Any] | None, asked: list[Call], **arguments: Any) -> Engine:
    if options:
        every = (
            {"num_speculative_tokens_per_batch_size": "off", "min_survival": 0} if options["method"] == "mtpc" else {}
        )
        arguments["speculative_config"] = {**options, **every, "model": str(demo.path(options["model"]))}
    arguments = {"max_model_len": 160, "max_num_seqs": 20, "enable_prefix_caching": True, **arguments}
    return Engine(str(demo.path("target")), asked, arguments)


@pytest.fixture(scope="module")
def outputs() -> Any:
    """Replies by runner and method, made when they are first asked for."""
    made: dict[str, dict[str, list[Reply]]] = {}

    def of(runner: str) -> dict[str, list[Reply]]:
        if runner not in made:
            methods = METHODS[runner]
            engines = {name: engine(options, calls()) for name, options in methods.items()}
            made[runner] = run(engines, runner, async_scheduling=runner == "v2")
            for name, replies in made[runner].items():
                assert not isinstance(replies, str), (name, replies)
        return made[runner]

    return of


@pytest.mark.parametrize(("runner", "method"), COLUMNS)
@pytest.mark.parametrize("row", ["temperature", *NAMED])
def test_a_request_is_answered_as_without_drafts(outputs: Any, runner: str, method: str, row: str) -> None:
    index = list(ROWS).index(row)
    plain, ours = outputs(runner)["plain"][0], outputs(runner)[method][0]
    assert ours.tokens[index] == plain.tokens[index]
    assert ours.texts[index] == plain.texts[index]
    assert ours.finish[index] == plain.finish[index]
    if row in ("logprobs", "prompt logprobs"):
        parts = [
            reply.logprobs[index][0] if row == "logprobs" else reply.prompt_logprobs[index] for reply in (plain, ours)
        ]
        same_logprobs(*parts)


@pytest.mark.parametrize(("runner", "method"), COLUMNS)
def test_rows_differ_and_drafts_are_accepted(outputs: Any, runner: str, method: str) -> None:
    """A parameter that changes nothing would be tested by nothing."""
    plain = outputs(runner)["plain"][0]
    texts = dict(zip(ROWS, (texts[0] for texts in plain.texts), strict=True))
    same = {"temperature", "top-k", "top-p", "n", "logprobs", "prompt logprobs"}
    assert {row for row, text in texts.items() if text == texts["temperature"]} == same
    assert outputs(runner)[method][0].metrics[ACCEPTED] > 20


@pytest.mark.feature("ignore_eos, end of text", "exact")
@pytest.mark.parametrize(("runner", "method"), COLUMNS)
def test_end_of_text_is_ignored_where_that_is_asked(outputs: Any, runner: str, method: str) -> None:
    plain, ours = outputs(runner)["plain"][1], outputs(runner)[method][1]
    assert ours.tokens == plain.tokens
    assert ours.tokens == [[[EOS] * 8], [[EOS]]]
