"""`mtpc_drafts` of a request: its own number of drafts, none, or a refusal; the text is plain vLLM's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine import Call, Engine, Reply, beside_plain
from tests.support.models import make_head, make_ptp_head, make_target
from tests.support.requests import COLUMNS, same_logprobs

PROMPTS = [[3, 9, 4], [20, 21, 22, 23, 24], [7, 7, 1, 12]]
DRAFTS, CUT = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_drafts_cut"
OPTIONS = {"mtpc": {"method": "mtpc"}, "ptp": {"method": "ptp", "max_aux_rows": 32}}
ASKED: dict[str, list[int | None]] = {
    "all": [None, None, None],
    "none": [0, 0, 0],
    "one each": [1, 1, 1],
    "mixed": [0, 1, None],
}


def call(asked: list[int | None], is_drawn: bool) -> Call:
    how = {"temperature": 1.0, "seed": 5} if is_drawn else {"temperature": 0.0}
    base = {"max_tokens": 20, "ignore_eos": True, "detokenize": False, **how}
    sampling = [base if one is None else {**base, "extra_args": {"mtpc_drafts": one}} for one in asked]
    return Call(PROMPTS, sampling)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafts")
    target = make_target(folder / "target", 48, seed=3)
    make_head(folder / "mtpc", target, "btree", 4, 2)
    make_ptp_head(folder / "ptp", target, "o-ptp", 4, scale=0.01)
    return folder


@pytest.fixture(scope="module")
def replies(folder: Path) -> Any:
    """By runner and head: replies to ASKED, greedy then drawn, then to a bad number; and plain vLLM's to "all"."""
    made: dict[tuple[str, str], tuple[list[Reply], list[Reply]]] = {}

    def of(runner: str, head: str) -> tuple[list[Reply], list[Reply]]:
        if (runner, head) not in made:
            arguments = {"skip_tokenizer_init": True, "max_model_len": 64}
            refused = Call(PROMPTS, [{"extra_args": {"mtpc_drafts": 4}}] * 3, is_refused=True)
            calls = [call(asked, drawn) for drawn in (False, True) for asked in ASKED.values()]
            spec = {**OPTIONS[head], "model": str(folder / head), "num_speculative_tokens_per_batch_size": "off"}
            if runner == "v1":
                spec["min_survival"] = 0.0
            ours = Engine(str(folder / "target"), [*calls, refused], {**arguments, "speculative_config": spec})
            plain = Engine(str(folder / "target"), [calls[0], calls[len(ASKED)]], arguments)
            made[runner, head] = beside_plain(ours, plain, runner)
        return made[runner, head]

    return of


@pytest.mark.feature("mtpc_drafts of a request", "exact")
@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_text_is_the_same(replies: Any, runner: str, head: str) -> None:
    ours, plain = replies(runner, head)
    greedy, drawn = ours[: len(ASKED)], ours[len(ASKED) : 2 * len(ASKED)]
    for name, reply in zip(ASKED, greedy, strict=True):
        assert reply.tokens == plain[0].tokens, name
    for name, reply in zip(ASKED, drawn, strict=True):  # PTP's seeded text is its own, whatever is drafted
        assert reply.tokens == (drawn[0] if head == "ptp" else plain[1]).tokens, name


@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_drafts_are_those_asked_for(replies: Any, runner: str, head: str) -> None:
    ours, _ = replies(runner, head)
    verified = [reply.metrics[DRAFTS] for reply in ours[: len(ASKED)]]
    of = dict(zip(ASKED, (now - before for before, now in pairwise([0, *verified])), strict=True))
    assert of["none"] == 0
    steps = 3 * 20  # one token each at least
    assert 0 < of["one each"] < steps
    assert of["one each"] < of["mixed"] < of["all"]


@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_a_bad_number_is_refused(replies: Any, runner: str, head: str) -> None:
    ours, _ = replies(runner, head)
    assert "mtpc_drafts=4; allowed are whole numbers from 0 (no drafts) to 3" in ours[-1].error


# next to each other: requests that vLLM serves with no drafts, and one that has them
WITHOUT: dict[str, list[dict[str, Any]]] = {
    "min_p": [{"min_p": 0.2}, {"min_p": 0.05, "logprobs": 2}, {}],
    "logit_bias": [{"logit_bias": {7: 4.0, 9: -100.0}}, {"logit_bias": {3: 2.0}}, {}],
    "logprob_token_ids": [{"logprob_token_ids": [5, 9, 40], "max_tokens": 6}, {}, {}],
    "logprob_token_ids and logprobs": [{"logprob_token_ids": [5, 9], "max_tokens": 9}, {"logprobs": 3}, {}],
}


def without(is_drawn: bool) -> list[Call]:
    (base,) = call([None], is_drawn).sampling
    return [Call(PROMPTS, [{**base, **one} for one in rows]) for rows in WITHOUT.values()]


@pytest.mark.feature("min_p, logit_bias", "exact")
@pytest.mark.parametrize(("runner", "head"), COLUMNS)
def test_requests_that_vllm_serves_with_no_drafts_are_served_without(folder: Path, runner: str, head: str) -> None:
    arguments = {"skip_tokenizer_init": True, "max_model_len": 64}
    spec = {**OPTIONS[head], "model": str(folder / head), "num_speculative_tokens_per_batch_size": "off"}
    if runner == "v1":
        spec["min_survival"] = 0.0
    calls = without(False) + without(True) * (head == "mtpc")  # PTP's seeded text is its own
    ours, plain = beside_plain(
        Engine(str(folder / "target"), calls, {**arguments, "speculative_config": spec}),
        Engine(str(folder / "target"), calls, arguments),
        runner,
    )
    drafts = 0
    for name, mine, theirs in zip([*WITHOUT] * 2, ours, plain, strict=head == "mtpc"):
        assert mine.tokens == theirs.tokens, name
        for (one,), (other,) in zip(mine.logprobs, theirs.logprobs, strict=True):
            same_logprobs(other or [None] * 3, one or [None] * 3)
        assert mine.metrics[DRAFTS] > drafts, "the others have drafts"
        drafts = mine.metrics[DRAFTS]
