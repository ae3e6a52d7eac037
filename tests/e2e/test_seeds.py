"""A request with a seed has the text of plain vLLM, whatever is drafted for it and for its neighbours.

Plain vLLM and an engine with a head answer the same requests. What must not change the text happens in them:
batches whose number of drafts switches between 7, 3, 1 and 0, prompts in chunks, preemption, prefix hits, neighbours
without a seed, four answers per request.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import forks
from tests.support.engine import DEMO, Call, Reply, build, run
from tests.support.requests import CODE
from vllm_mtpc.proposers.options.versions import keys_noise_by_draft

KEY = "num_speculative_tokens_per_batch_size"

PROMPTS, TOKENS = 30, 12  # every temperature with all options, and with all lengths
PROCESSED: list[dict[str, Any]] = [{}, {"top_k": 3}, {"top_p": 0.8}, {"presence_penalty": 1.0}]
SCHEDULE = [[1, 2, 7], [3, 5, 3], [6, 6, 1], [7, 12, 0]]
LENGTHS = (6, 150, 64, 12, 90)


def seeded(index: int, **more: Any) -> dict[str, Any]:
    given = {"temperature": (0.7, 1.0, 1.3)[index % 3], **PROCESSED[index // 3 % 4], "seed": index}
    return {**given, "ignore_eos": True, "max_tokens": TOKENS, **more}


def calls() -> dict[str, Call]:
    unseeded = {"temperature": 1.0, "ignore_eos": True, "max_tokens": TOKENS}
    some = [list((3 * CODE)[index % 100 :][: LENGTHS[index % 5]]) for index in range(PROMPTS)]
    return {
        "30 prompts": Call(some, [seeded(index) for index in range(PROMPTS)]),
        "few at once": Call(some[1:3], [seeded(index, max_tokens=80) for index in (1, 2)]),  # not the coldest
        "next to others": Call(some[:12], [seeded(index) if index % 2 else unseeded for index in range(12)]),
        "n=4": Call(some[:3], [seeded(index, n=4) for index in range(3)]),
        "prefix hits": Call([some[1]] * 2, [seeded(index, max_tokens=30) for index in range(2)]),
    }


FAULTS = {"v1": "noise of other tokens", "v2": "noise of the first row"}
APART = {"v1": "drafts of their own v1", "v2": "drafts of their own"}
SIZES = {"max_num_seqs": 12, "max_model_len": 240, "block_size": 32}


@pytest.fixture(scope="module", params=["v1", "v2"])
def outputs(request: pytest.FixtureRequest) -> dict[str, list[Reply]]:
    """Outputs of plain vLLM, of the head, and of the injected faults and block verification to the few."""
    runner = request.param
    if runner == "v1" and forks.ON_GPU:
        pytest.skip("V1 on a GPU draws noise of the vocabulary's size: a seed promises the distribution alone there")
    # V1 on a CPU cannot read a seeded prompt in chunks, with or without drafts; its plan depends on time
    more = {"enable_chunked_prefill": False, "max_num_batched_tokens": 240}
    if runner == "v2":
        more = {"max_num_batched_tokens": 48}  # less than most prompts, and than all drafts of a batch
    more |= {**SIZES, "num_gpu_blocks_override": 16, "enable_prefix_caching": True}
    spec = {KEY: SCHEDULE}
    asked, noted = list(calls().values()), "noted drafts v1" if runner == "v1" else "noted states"
    engines = {"plain": build(DEMO, None, asked, **more), "head": build(DEMO, "btree", asked, noted, spec, **more)}
    few = calls()["few at once"]
    for fault in (FAULTS[runner], APART[runner]):
        engines[fault] = build(DEMO, "btree", [few], fault, spec, **more)
    if runner == "v2":
        block, asked = {"rejection_sample_method": "block", KEY: "off"}, [few, Call(few.prompts[:1], few.sampling[:1])]
        for name, verify in (("block", None), ("block, rejection", "rejection")):
            engines[name] = build(DEMO, "btree", asked, "noted_seeds", block | {"verify": verify}, **more)
    return run(engines, runner)


@pytest.mark.parametrize("name", list(calls()))
def test_seeded_text_is_plain_vllms(outputs: dict[str, list[Reply]], name: str) -> None:
    at = list(calls()).index(name)
    wanted, found = outputs["plain"][at].tokens, outputs["head"][at].tokens
    for index, given in enumerate(calls()[name].sampling):
        if "seed" in given:
            assert found[index] == wanted[index], (index, given)


def test_other_noise_is_found_and_drafts_take_the_targets(outputs: dict[str, list[Reply]]) -> None:
    """With noise of their own drafts are kept less often, and the text is the same."""
    at = list(calls()).index("few at once")
    wanted, runner = outputs["plain"][at].tokens, "v2" if "block" in outputs else "v1"
    assert outputs[FAULTS[runner]][0].tokens != wanted
    (apart,) = outputs[APART[runner]]
    assert apart.tokens == wanted
    kept = outputs["head"][at].accepted - outputs["head"][at - 1].accepted
    assert kept > 1.1 * apart.accepted


def test_every_scenario_happened(outputs: dict[str, list[Reply]]) -> None:
    first, last = outputs["head"][0], outputs["head"][-1]
    steps = [note for reply in outputs["head"] for note in reply.recorded]  # V2: of each request
    assert {len(note["drafts"]) if isinstance(note, dict) else max(map(len, note)) for note in steps} >= {7, 3, 1, 0}
    assert last.metrics["vllm:num_preemptions"] > 0  # of all calls
    assert last.metrics["vllm:prefix_cache_hits"] > 0
    assert first.accepted > 0.2 * first.drafted


def test_block_verification_has_noise_of_each_step(outputs: dict[str, list[Reply]]) -> None:
    """Coupled, text is plain vLLM's; else it does not depend on the batch.

    The drafter notes a step's seed by its anchor, the verifier the same one; and none comes twice. vLLM 0.33's verifier
    has noise of a step's own.
    """
    if "block" not in outputs:
        pytest.skip("Model Runner V1 has no block verification: rejection_sample_method block needs V2")
    assert outputs["block"][0].tokens == outputs["plain"][list(calls()).index("few at once")].tokens
    together, alone = outputs["block, rejection"]
    assert together.tokens[0] == alone.tokens[0]
    drafted = [(seed, anchor) for who, seed, anchor in alone.recorded if who == "speculator"]
    verified = [(seed, anchor) for who, seed, anchor in alone.recorded if who == "verification"]
    used = drafted if keys_noise_by_draft() else verified
    assert len(used) > 3 and len(set(used)) == len(used) and {seed for seed, _ in used} == {1}
    assert verified == [] if keys_noise_by_draft() else set(verified) <= set(drafted)
