"""What only a GPU has: CUDA graphs on and off, sleep and wake. For `benchmarks/gpu/run.sh tests`.

At toy size, on a CPU, engines are eager and stay awake: the calls are tried, nothing is shown.
"""

from __future__ import annotations

import os
from dataclasses import replace

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


def accepted(outputs: dict[str, Reply], name: str) -> float:
    """Drafts accepted in one call."""
    counts = [reply.accepted for reply in outputs.values()]
    place = list(outputs).index(name)
    return counts[place] - (counts[place - 1] if place else 0)


@pytest.mark.parametrize("name", EAGER)
def test_greedy_text_is_plain_vllms(outputs: dict[str, dict[str, Reply]], name: str) -> None:
    assert outputs[name]["greedy"].tokens == outputs["plain"]["greedy"].tokens
    assert accepted(outputs[name], "greedy") > len(BATCH)


@pytest.mark.skipif(not forks.ON_GPU, reason="a CPU has no CUDA graphs")
def test_engines_have_graphs_and_asynchronous_scheduling(outputs: dict[str, dict[str, Reply]]) -> None:
    modes = {name: replies["greedy"].modes for name, replies in outputs.items()}
    print(modes)
    assert all(is_async for _, is_async in modes.values())
    assert [mode == "NONE" for mode, _ in modes.values()] == [name == "eager" for name in modes]


@pytest.mark.parametrize("call", CALLS)
def test_graphs_change_nothing(outputs: dict[str, dict[str, Reply]], call: str) -> None:
    """Float32: what inductor fuses is computed in another order, which moves no token of these."""
    first, *others = (outputs[name] for name in EAGER)
    for other in others:
        assert other[call].tokens == first[call].tokens


@pytest.mark.parametrize("name", EAGER)
def test_seeded_text_does_not_depend_on_its_batch(
    outputs: dict[str, dict[str, Reply]], name: str, request: pytest.FixtureRequest
) -> None:
    """Of a circuit's head it is plain vLLM's; PTP picks tokens by numbers of its own."""
    assert outputs[name]["seeded next to others"].tokens[0] == outputs[name]["seeded"].tokens[0]
    if HEADS[request.node.callspec.params["outputs"]] == "mtpc":
        assert outputs[name]["seeded"].tokens == outputs["plain"]["seeded"].tokens


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", EAGER)
def test_sleep_changes_nothing(outputs: dict[str, dict[str, Reply]], name: str, level: int) -> None:
    """Nor are drafts accepted less: what the head keeps next to its weights is there again."""
    asleep = f"after sleep level {level}"
    assert outputs[name][asleep].tokens == outputs[name]["greedy"].tokens
    awake = accepted(outputs[name], "greedy")
    assert accepted(outputs[name], asleep) >= 0.9 * awake  # K may depend on what was accepted
