"""Greedy output with drafts, token for token against plain vLLM, on both model runners.

One engine per circuit, small enough that every way a batch can look happens in it; the counters are
asserted, so that a scenario that stopped happening fails instead of passing unseen.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engine import DEMO, Call, Reply, ask, build, run
from tests.support.requests import CODE, LENGTHS, prompt, same_logprobs

OPTIONS: dict[str, dict[str, Any]] = {  # of btree
    "3 drafts": {"num_speculative_tokens": 3},
    "greedy drafts": {"draft_sample_method": "greedy"},
    "head in float32": {"head_dtype": "float32"},
    "head in bfloat16": {"head_dtype": "bfloat16"},
}
BUDGET, BLOCKS = 40, 10  # tokens per step; KV blocks of 32, too few for eight requests at once


def scenarios() -> dict[str, Call]:
    batch = [prompt(length, start) for start, length in enumerate(LENGTHS)]
    greedy = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 40}
    sampled = {**greedy, "temperature": 0.8, "seed": 7}
    # vLLM refuses n > 1 at temperature 0; top-k 1 draws the greedy token through the sampling path
    seeds = [{**greedy, "seed": 5}, {**sampled, "top_k": 1, "n": 2}]
    return {
        "single": ask([prompt(12)], 40),
        # long enough that requests outgrow the blocks although drafts are accepted
        "batch of 8, chunked prefill, preemption": ask(batch, 64),
        "prefix-cache hit": ask([prompt(100, 7)], 40),
        "seed and n=2": Call([prompt(9), prompt(12)], seeds),
        # within one step's budget: V1 on a CPU cannot read a seeded prompt in chunks, with or without drafts
        "greedy next to sampled": Call(batch[:3], [greedy, sampled, greedy]),
        "logprobs": ask([prompt(25)], 40, logprobs=2),
        "end of context": ask([prompt(100) * 2], 60),
        "sampled alone": Call(batch[1:2], [sampled]),
    }


V1 = (pytest.mark.column("mtpc on V1"), pytest.mark.feature("synchronous scheduling", "exact"))
V2 = (pytest.mark.column("mtpc on V2"), pytest.mark.feature("asynchronous scheduling", "exact"))
SLOW = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=[
        # in every run a circuit without a latent and one with all instructions; V2, which is interpreted, has one
        pytest.param(("v1", ("ff", "btree")), marks=V1, id="v1"),
        pytest.param(("v2", ("btree",)), marks=V2, id="v2"),
        pytest.param(("v1", ("cp", "hmm", *OPTIONS)), marks=[SLOW, *V1], id="v1, others"),
        pytest.param(("v2", ("ff", "cp", "hmm", "3 drafts", "greedy drafts")), marks=[SLOW, *V2], id="v2, others"),
    ],
)
def answers(request: pytest.FixtureRequest) -> dict[str, list[Reply]]:
    """Replies of plain vLLM and of the engines with drafts, by name."""
    runner, names = request.param
    arguments = {
        "max_model_len": 240,
        "max_num_batched_tokens": BUDGET,
        "block_size": 32,
        "num_gpu_blocks_override": BLOCKS,
        "enable_prefix_caching": True,
    }
    calls = list(scenarios().values())
    engines = {"plain": build(DEMO, None, calls, **arguments)}
    for name in names:
        engines[name] = build(DEMO, "btree" if name in OPTIONS else name, calls, spec=OPTIONS.get(name), **arguments)
    return run(engines, runner)


def drafted(answers: dict[str, list[Reply]]) -> dict[str, list[Reply]]:
    return {name: replies for name, replies in answers.items() if name != "plain"}


def is_greedy(call: Call, index: int) -> bool:
    sampling = call.sampling[index]
    return sampling["temperature"] == 0 or sampling.get("top_k") == 1


@pytest.mark.feature("prefix caching", "exact")
@pytest.mark.feature("chunked prefill", "exact")
@pytest.mark.feature("preemption by recompute", "exact")
@pytest.mark.feature("max_model_len reached", "exact")
@pytest.mark.feature("eager", "exact")
def test_greedy_equals_plain(answers: dict[str, list[Reply]]) -> None:
    for name, replies in drafted(answers).items():
        for (scenario, call), plain, ours in zip(scenarios().items(), answers["plain"], replies, strict=True):
            for index in range(len(call.prompts)):
                if is_greedy(call, index):
                    assert ours.tokens[index] == plain.tokens[index], (name, scenario, index)
                    assert ours.finish[index] == plain.finish[index], (name, scenario, index)


def test_every_scenario_happened(answers: dict[str, list[Reply]]) -> None:
    for name, replies in drafted(answers).items():
        last = replies[-1]
        assert 0.05 < last.accepted / last.drafted < 0.95, name  # accepted and rejected
        assert last.metrics["vllm:num_preemptions"] > 0 and last.metrics["vllm:prefix_cache_hits"] > 0, name
    assert len(CODE) >= 107 and max(LENGTHS) > BUDGET  # prompts are whole, and longer than a step


@pytest.mark.feature("logprobs", "exact")
def test_logprobs_equal_plain(answers: dict[str, list[Reply]]) -> None:
    index = list(scenarios()).index("logprobs")
    for name, replies in drafted(answers).items():
        plain, ours = (reply[index].logprobs[0][0] for reply in (answers["plain"], replies))
        assert len(plain) == 40, name
        same_logprobs(plain, ours)


@pytest.mark.feature("seed: the same text in any batch", "exact")
def test_seeded_request_does_not_depend_on_its_batch(answers: dict[str, list[Reply]]) -> None:
    names = list(scenarios())
    for name, replies in drafted(answers).items():
        next_to = replies[names.index("greedy next to sampled")].tokens[1]
        assert next_to == replies[names.index("sampled alone")].tokens[0], name


@pytest.mark.feature("asynchronous scheduling", "off", "mtpc on V1", why="V1 drafts from token lists on the host")
def test_v1_is_scheduled_synchronously() -> None:
    from vllm_mtpc.proposers.config.circuit_options import MtpcSpeculativeConfig

    spec = SimpleNamespace(
        method="mtpc",
        head=SimpleNamespace(head="linear", lora_layers=0),
        aux_layers=(),
        rejection_sample_method="standard",
        min_acceptance=None,
        verify=None,
        has_default_schedule=True,
        num_speculative_tokens_per_batch_size=[(1, 8, 3)],
    )
    config = SimpleNamespace(
        speculative_config=spec,
        use_v2_model_runner=False,
        scheduler_config=SimpleNamespace(async_scheduling=True),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        structured_outputs_config=SimpleNamespace(backend="auto"),
        lora_config=None,
    )
    MtpcSpeculativeConfig.check_engine(spec, config)
    assert config.scheduler_config.async_scheduling is False
    assert spec.num_speculative_tokens_per_batch_size is None  # the worker plans by what it observes
