"""Greedy output with drafts, token for token against plain vLLM, on both model runners.

One engine per circuit, small enough that every way a batch can look happens in it; the counters are
asserted, so that a scenario that stopped happening fails instead of passing unseen.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.engine import Call, Engine, Reply, run
from vllm_mtpc import demo

CIRCUITS = ["ff", "cp", "hmm", "btree"]
CODE = (
    b'def read(path):\n    """Return the text of a file."""\n    with open(path) as file:\n        return file.read()\n'
)
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40}
LENGTHS = (5, 9, 14, 21, 30, 47, 70, 100)  # the last three exceed the step's token budget
BUDGET, BLOCKS = 40, 10  # tokens per step; KV blocks of 32, too few for eight requests at once


def prompt(length: int, start: int = 0) -> list[int]:
    return list(CODE[start : start + length])


def scenarios() -> dict[str, Call]:
    batch = [prompt(length, start) for start, length in enumerate(LENGTHS)]
    sampled = {"temperature": 0.8, "seed": 7, "ignore_eos": True, "max_tokens": 40}
    # vLLM refuses n > 1 at temperature 0; top-k 1 draws the greedy token through the sampling path
    top_one = {**sampled, "top_k": 1, "n": 2}
    return {
        "single": Call([prompt(12)], [GREEDY]),
        # long enough that requests outgrow the blocks although drafts are accepted
        "batch of 8, chunked prefill, preemption": Call(batch, [{**GREEDY, "max_tokens": 64}] * 8),
        "prefix-cache hit": Call([prompt(100, 7)], [GREEDY]),
        "seed and n=2": Call([prompt(9), prompt(12)], [{**GREEDY, "seed": 5}, top_one]),
        # within one step's budget: V1 on a CPU cannot read a seeded prompt in chunks, with or without drafts
        "greedy beside sampled": Call(batch[:3], [GREEDY, sampled, GREEDY]),
        "logprobs": Call([prompt(25)], [{**GREEDY, "logprobs": 2}]),
        "end of context": Call([prompt(100) * 2], [{**GREEDY, "max_tokens": 60}]),
        "sampled alone": Call([batch[1]], [sampled]),
    }


def engine(speculative_config: dict[str, Any] | None) -> Engine:
    arguments = {
        "speculative_config": speculative_config,
        "max_model_len": 240,
        "max_num_batched_tokens": BUDGET,
        "block_size": 32,
        "num_gpu_blocks_override": BLOCKS,
        "enable_prefix_caching": True,
    }
    return Engine(str(demo.path("target")), list(scenarios().values()), arguments)


@pytest.fixture(scope="module", params=["v1", "v2"])
def answers(request: pytest.FixtureRequest) -> dict[str, Any]:
    engines = {"plain": engine(None)}
    for circuit in CIRCUITS:
        engines[circuit] = engine({"method": "mtpc", "model": str(demo.path(circuit))})
    head = str(demo.path("btree"))
    engines["3 drafts"] = engine({"method": "mtpc", "model": head, "num_speculative_tokens": 3})
    engines["greedy drafts"] = engine({"method": "mtpc", "model": head, "draft_sample_method": "greedy"})
    return run(engines, request.param, async_scheduling=request.param == "v2")


def is_greedy(call: Call, index: int) -> bool:
    sampling = call.sampling[index]
    return sampling["temperature"] == 0 or sampling.get("top_k") == 1


@pytest.mark.parametrize("name", [*CIRCUITS, "3 drafts", "greedy drafts"])
def test_greedy_equals_plain(answers: dict[str, Any], name: str) -> None:
    assert not isinstance(answers["plain"], str), answers["plain"]
    assert not isinstance(answers[name], str), answers[name]
    for (scenario, call), plain, drafted in zip(scenarios().items(), answers["plain"], answers[name], strict=True):
        for index in range(len(call.prompts)):
            if is_greedy(call, index):
                assert drafted.tokens[index] == plain.tokens[index], (scenario, index)
                assert drafted.finish[index] == plain.finish[index], (scenario, index)


@pytest.mark.parametrize("name", [*CIRCUITS, "3 drafts", "greedy drafts"])
def test_every_scenario_happened(answers: dict[str, Any], name: str) -> None:
    last: Reply = answers[name][-1]
    accepted = last.metrics["vllm:spec_decode_num_accepted_tokens"]
    drafted = last.metrics["vllm:spec_decode_num_draft_tokens"]
    assert 0.05 < accepted / drafted < 0.95  # drafts were accepted and rejected
    assert last.metrics["vllm:num_preemptions"] > 0
    assert last.metrics["vllm:prefix_cache_hits"] > 0
    assert len(CODE) >= 107 and max(LENGTHS) > BUDGET  # prompts are whole, and longer than a step


@pytest.mark.parametrize("name", CIRCUITS)
def test_logprobs_equal_plain(answers: dict[str, Any], name: str) -> None:
    index = list(scenarios()).index("logprobs")
    plain, drafted = (answers[which][index].logprobs[0][0] for which in ("plain", name))
    assert len(plain) == len(drafted) == GREEDY["max_tokens"]
    for ours, theirs in zip(drafted, plain, strict=True):
        assert ours.keys() == theirs.keys()
        # float32 forward passes over 1 and over 8 rows sum in another order
        assert all(abs(ours[token].logprob - theirs[token].logprob) < 1e-3 for token in ours)


@pytest.mark.parametrize("name", ["btree", "greedy drafts"])
def test_seeded_request_does_not_depend_on_its_batch(answers: dict[str, Any], name: str) -> None:
    names = list(scenarios())
    beside = answers[name][names.index("greedy beside sampled")].tokens[1]
    alone = answers[name][names.index("sampled alone")].tokens[0]
    assert beside == alone
