"""A request with a seed has the text of plain vLLM, whatever is drafted for it and for its neighbours.

Plain vLLM and an engine with a head answer the same requests. What must not change the text happens in them:
batches whose number of drafts switches between 7, 3, 1 and 0, prompts in chunks, preemption, prefix hits, neighbours
without a seed, four answers per request.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import forks
from tests.support.engine import DEMO, Call, Engine, Reply, ask, build, run
from tests.support.requests import CODE, RUNNERS

KEY = "num_speculative_tokens_per_batch_size"

PROMPTS, TOKENS = 84, 12  # every combination of temperature, options and length
PROCESSED: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.8}, {"presence_penalty": 1.0}]
SCHEDULE = [[1, 2, 7], [3, 5, 3], [6, 6, 1], [7, 12, 0]]
LENGTHS = (6, 150, 33, 64, 12, 90, 20)


def seeded(index: int, **more: Any) -> dict[str, Any]:
    return {
        "temperature": (0.7, 1.0, 1.3)[index % 3],
        **PROCESSED[index // 3 % 4],
        "seed": index,
        "ignore_eos": True,
        "max_tokens": TOKENS,
        **more,
    }


def calls() -> dict[str, Call]:
    unseeded = {"temperature": 1.0, "ignore_eos": True, "max_tokens": TOKENS}
    some = [list((3 * CODE)[index % 100 :][: LENGTHS[index % 7]]) for index in range(PROMPTS)]
    return {
        "84 prompts": Call(some, [seeded(index) for index in range(PROMPTS)]),
        "few at once": Call(some[:2], [seeded(index, max_tokens=40) for index in range(2)]),
        "next to others": Call(some[:12], [seeded(index) if index % 2 else unseeded for index in range(12)]),
        "n=4": Call(some[:3], [seeded(index, n=4) for index in range(3)]),
        "prefix hits": Call([some[1]] * 2, [seeded(index, max_tokens=30) for index in range(2)]),
    }


FAULTS = {"v1": ("noise of other tokens",), "v2": ("noise of the first row", "noise of drafts")}
APART = {"v1": "drafts of their own v1", "v2": "drafts of their own"}


def engine(
    spec: dict[str, Any] | None, injected: str | None = None, names: list[str] | None = None, **more: Any
) -> Engine:
    arguments = {
        "max_num_seqs": 12,
        "max_model_len": 240,
        "max_num_batched_tokens": 48,  # less than most prompts, and than all drafts of a batch
        "block_size": 32,
        "num_gpu_blocks_override": 16,
        "enable_prefix_caching": True,
        **more,
    }
    asked = calls()
    head = None if spec is None else "btree"
    return build(
        DEMO, head, [asked[name] for name in names or asked], injected, {KEY: SCHEDULE, **(spec or {})}, **arguments
    )


@pytest.fixture(scope="module", params=RUNNERS)
def outputs(request: pytest.FixtureRequest) -> dict[str, list[Reply]]:
    """Outputs of plain vLLM, of the head, and of the injected faults to the few; and the runner's name."""
    runner = request.param
    if runner == "v1" and forks.ON_GPU:
        pytest.skip("V1 on a GPU draws noise of the vocabulary's size: a seed promises the distribution alone there")
    # V1 on a CPU cannot read a seeded prompt in chunks, with or without drafts; its plan depends on time
    more = {"enable_chunked_prefill": False, "max_num_batched_tokens": 240} if runner == "v1" else {}
    given = {"min_acceptance": 0} if runner == "v1" else {}
    noted = "noted lengths v1" if runner == "v1" else "noted lengths"
    engines = {"plain": engine(None, **more), "head": engine(given, noted, **more)}
    engines |= {fault: engine(given, fault, ["few at once"], **more) for fault in (*FAULTS[runner], APART[runner])}
    return run(engines, runner)


@pytest.mark.feature("seed: the text of plain vLLM", "exact")
@pytest.mark.feature("seed: the same text in any batch", "exact")
@pytest.mark.feature("n > 1", "exact")
@pytest.mark.feature("preemption by recompute", "exact")
@pytest.mark.feature("prefix caching", "exact", why="with hits counted")
@pytest.mark.parametrize("name", list(calls()))
def test_seeded_text_is_plain_vllms(outputs: dict[str, list[Reply]], name: str) -> None:
    at = list(calls()).index(name)
    wanted, found = outputs["plain"][at].tokens, outputs["head"][at].tokens
    for index, given in enumerate(calls()[name].sampling):
        if "seed" in given:
            assert found[index] == wanted[index], (index, given)


def test_other_noise_is_found(outputs: dict[str, list[Reply]]) -> None:
    wanted = outputs["plain"][list(calls()).index("few at once")].tokens
    faults = [outputs[name] for names in FAULTS.values() for name in names if name in outputs]
    assert faults and all(replies[0].tokens != wanted for replies in faults)


def test_drafts_take_the_targets_noise(outputs: dict[str, list[Reply]]) -> None:
    """With noise of their own the text is the same, and they are kept less often."""
    at = list(calls()).index("few at once")
    apart = next(outputs[name][0] for name in APART.values() if name in outputs)
    assert apart.tokens == outputs["plain"][at].tokens
    kept, kept_apart = outputs["head"][at].accepted - outputs["head"][at - 1].accepted, apart.accepted
    print(f"of about as many drafts {kept} are kept, {kept_apart} with noise of their own")
    assert kept > 1.1 * kept_apart


def test_every_scenario_happened(outputs: dict[str, list[Reply]]) -> None:
    first, last = outputs["head"][0], outputs["head"][-1]
    assert {drafts for reply in outputs["head"] for _, drafts in reply.recorded} >= {7, 3, 1, 0}
    assert first.metrics["vllm:num_preemptions"] > 0
    assert last.metrics["vllm:prefix_cache_hits"] > 0
    assert first.accepted > 0.2 * first.drafted


@pytest.mark.slow
@pytest.mark.parametrize("circuit", ["ff", "btree"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_coupling_accepts_almost_as_many_drafts(circuit: str, temperature: float) -> None:
    """The table of docs/serving.md, of 40 texts without a seed. (1 - TV) / (1 + TV) is never below half of 1 - TV."""
    calls = [ask([list((3 * CODE)[at : at + 60]) for at in range(40)], 40, temperature=temperature)]
    sizes = {"max_num_seqs": 12, "max_model_len": 240, "max_num_batched_tokens": 512, "block_size": 32}
    engines = {
        verify: build(DEMO, circuit, calls, spec={"verify": verify, KEY: "off"}, num_gpu_blocks_override=64, **sizes)
        for verify in ("coupled", "rejection")
    }
    found = {  # every step of the target is counted
        verify: 1 + reply.accepted / reply.metrics["vllm:spec_decode_steps"]
        for verify, (reply,) in run(engines, "v2", async_scheduling=False).items()
    }
    print(f"{circuit}, T={temperature}: {found}")
    assert found["coupled"] > 1 + (found["rejection"] - 1) / 2
