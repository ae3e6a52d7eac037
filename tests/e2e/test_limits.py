"""What one request must not take from the others in its batch: drafts near the end of a context."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.engine import Call, Engine, Reply, run
from tests.support.requests import prompt
from vllm_mtpc import demo

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 24}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def engine(calls: list[Call], options: dict[str, Any] | None, **arguments: Any) -> Engine:
    head = {"method": "mtpc", "model": str(demo.path("btree"))}
    speculative = None if options is None else {**head, **options}
    return Engine(str(demo.path("target")), calls, {"speculative_config": speculative, **arguments})


def replies(outputs: dict[str, list[Reply] | str], name: str) -> list[Reply]:
    assert not isinstance(outputs[name], str), outputs[name]
    return outputs[name]


@pytest.mark.feature("max_model_len reached", "exact", "mtpc on V1")
def test_drafts_up_to_the_last_token() -> None:
    """V1: the context ends within a draft's length, where vLLM would hand every request of the batch K zeros."""
    calls = [Call([prompt(100)], [GREEDY])]
    outputs = run(
        {name: engine(calls, options, max_model_len=106) for name, options in (("plain", None), ("head", {}))}, "v1"
    )
    (plain,), (drafted,) = replies(outputs, "plain"), replies(outputs, "head")
    assert drafted.tokens == plain.tokens and len(plain.tokens[0][0]) == 6
    assert drafted.metrics[ACCEPTED] >= 2
