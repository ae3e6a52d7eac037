"""What only a GPU has: CUDA graphs on and off, sleep and wake. For `benchmarks/gpu/run.sh tests`.

At toy size, on a CPU, engines are eager and stay awake: the calls are tried, nothing is shown.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from tests.support import forks
from tests.support.engine import DEMO, Call, Reply, ask, build, run
from tests.support.requests import LENGTHS, prompt

IS_TOY = os.environ.get("MTPC_TEST_GPU") == "toy"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not forks.ON_GPU and not IS_TOY, reason="needs a GPU: benchmarks/gpu/run.sh tests"),
]
BATCH = [prompt(length, start) for start, length in enumerate(LENGTHS)]
GREEDY, SEEDED = ask(BATCH, 40), ask(BATCH[:1], 40, temperature=0.8, seed=7)
CALLS = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "seeded next to others": Call(BATCH, [*SEEDED.sampling, *GREEDY.sampling[1:]]),
    "after sleep level 1": replace(GREEDY, sleep=1),
    "after sleep level 2": replace(GREEDY, sleep=2),
}
EAGER = {"graphs": {}, "eager": {"enforce_eager": True}} if forks.ON_GPU else {"eager": {}}
HEADS = {"btree": "mtpc", "o-ptp": "ptp"} if forks.ON_GPU else {"btree": "mtpc"}
MANY = [prompt(LENGTHS[index % len(LENGTHS)], index % 50) for index in range(256 if forks.ON_GPU else 8)]
SERVED = {"btree": {}, "backbone": {}, "late": {"method": "ptp"}} if forks.ON_GPU else {"btree": {}}


def answer_many(head: str | None, spec: dict[str, Any] | None = None) -> Reply:
    """The reply to a batch of MANY; by default, but for float32 and all drafts in every step."""
    how: dict[str, Any] = {"max_num_seqs": len(MANY), "max_model_len": 240}
    if forks.ON_GPU:  # vLLM's own memory profile
        how |= {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.3}
    engine = build(DEMO, head, [ask(MANY, 64)], spec=spec, **how)
    return run({"it": engine}, "v2" if forks.ON_GPU else "v1")["it"][0]


@pytest.fixture(scope="module")
def plain() -> Reply:
    return answer_many(None)


@pytest.mark.parametrize("name", SERVED)
def test_many_requests_have_the_text_of_plain_vllm(plain: Reply, name: str) -> None:
    found = answer_many(name, SERVED[name])
    differing = sum(mine != its for mine, its in zip(found.tokens, plain.tokens, strict=True))
    assert not differing and found.accepted > 0


@pytest.fixture(scope="module", params=HEADS)
def outputs(request: pytest.FixtureRequest) -> dict[str, dict[str, Reply]]:
    """Replies by engine and call."""
    always, calls = {"max_model_len": 240, "enable_prefix_caching": False}, list(CALLS.values())
    engines = {"plain": build(DEMO, None, calls[:2], **always)}
    for name, how in EAGER.items():
        more = {**always, **how, "enable_sleep_mode": forks.ON_GPU}
        engines[name] = build(DEMO, request.param, calls, spec={"method": HEADS[request.param]}, **more)
    found = {}
    for name, engine in engines.items():  # a process each: vLLM lets one engine of a process sleep
        replies = run({name: engine}, "v2" if forks.ON_GPU else "v1")[name]
        found[name] = dict(zip(CALLS, replies, strict=False))
    return found


@pytest.mark.skipif(not forks.ON_GPU, reason="needs a GPU: benchmarks/gpu/run.sh tests; a CPU has no CUDA graphs")
def test_engines_have_graphs_and_asynchronous_scheduling(outputs: dict[str, dict[str, Reply]]) -> None:
    modes = {name: replies["greedy"].modes for name, replies in outputs.items()}
    assert all(is_async for _, is_async in modes.values())
    assert [mode == "NONE" for mode, _ in modes.values()] == [name == "eager" for name in modes]


def test_text_depends_on_neither_graphs_nor_batch(outputs: dict[str, dict[str, Reply]], request: Any) -> None:
    """Float32: what inductor fuses is computed in another order, which moves no token of these.

    Seeded text of a circuit's head is plain vLLM's; PTP picks tokens by numbers of its own.
    """
    plain, first = outputs["plain"], outputs[next(iter(EAGER))]
    for name in EAGER:
        found = outputs[name]
        assert found["greedy"].tokens == plain["greedy"].tokens and found["greedy"].accepted > len(BATCH)
        assert found["seeded next to others"].tokens[0] == found["seeded"].tokens[0]
        assert request.node.callspec.params["outputs"] == "o-ptp" or found["seeded"].tokens == plain["seeded"].tokens
        for call in CALLS:
            assert found[call].tokens == first[call].tokens, (name, call)


def test_sleep_changes_nothing(outputs: dict[str, dict[str, Reply]]) -> None:
    """Nor are drafts accepted less: what the head keeps next to its weights is there again."""
    for name, (before, level) in product(EAGER, pairwise(list(CALLS)[2:])):
        found = outputs[name]
        assert found[level].tokens == found["greedy"].tokens
        # K may depend on what was accepted
        assert found[level].accepted - found[before].accepted >= 0.9 * found["greedy"].accepted
