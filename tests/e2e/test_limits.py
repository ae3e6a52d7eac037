"""What one request must not take from the others in its batch: drafts near the end of a context, and the schedule."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.engine import Call, Engine, Reply, run
from tests.e2e.test_greedy import prompt
from vllm_mtpc import demo

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}
SEEDED = {"temperature": 0.8, "seed": 7, "ignore_eos": True, "max_tokens": 24}
DRAFTS = "vllm:spec_decode_num_draft_tokens"
STEPS = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def engine(calls: list[Call], options: dict[str, Any] | None, **arguments: Any) -> Engine:
    head = {"method": "mtpc", "model": str(demo.path("btree"))}
    speculative = None if options is None else {**head, **options}
    return Engine(str(demo.path("target")), calls, {"speculative_config": speculative, **arguments})


def replies(said: dict[str, list[Reply] | str], name: str) -> list[Reply]:
    assert not isinstance(said[name], str), said[name]
    return said[name]


@pytest.mark.feature("max_model_len reached", "exact", "mtpc on V1")
def test_drafts_up_to_the_last_token() -> None:
    """V1: the context ends within a draft's length, where vLLM would hand every request of the batch K zeros."""
    calls = [Call([prompt(100)], [GREEDY])]
    said = run(
        {name: engine(calls, options, max_model_len=106) for name, options in (("plain", None), ("head", {}))}, "v1"
    )
    (plain,), (drafted,) = replies(said, "plain"), replies(said, "head")
    assert drafted.tokens == plain.tokens and len(plain.tokens[0][0]) == 6
    assert drafted.metrics[ACCEPTED] >= 2


@pytest.mark.feature("seed: the same text in any batch", "exact", "mtpc on V2")
@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_seed_leaves_the_schedule_to_others(is_async: bool) -> None:
    """V2: two at once are not drafted for here; only the one with a seed is, and says what it says alone."""
    alone, beside = Call([prompt(9)], [SEEDED]), Call([prompt(9), prompt(12), prompt(30)], [SEEDED, GREEDY, GREEDY])
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 1, 7], [2, 64, 0]]}
    calls = [alone, Call([prompt(12), prompt(30)], [GREEDY] * 2), beside]
    said = run({"head": engine(calls, schedule), "plain": engine([calls[1]], None)}, "v2", is_async)
    (first, unseeded, mixed), (plain,) = replies(said, "head"), replies(said, "plain")
    steps = first.metrics[STEPS]
    assert steps > 0 and unseeded.metrics[STEPS] == steps  # a batch of two is left alone
    assert mixed.tokens[0] == first.tokens[0]
    assert mixed.tokens[1:] == unseeded.tokens == plain.tokens
    # the seeded request's own steps; the others' last ones, when one of them is alone, are its batch's schedule
    assert mixed.metrics[STEPS] - steps <= steps + 3
