"""The online plan in an engine of either runner: K follows the seconds of steps, and the text is plain vLLM's."""

from __future__ import annotations

from statistics import mean

import numpy as np
import pytest

from tests.support.engine import DEMO, ask, build, run
from tests.support.requests import ON, prompt
from vllm_mtpc.plan.draft_schedule import KEY

DRAFTS = 7  # of the demo's head
CALLS = [ask([prompt(12, at)], 80) for at in range(3)]


@pytest.mark.parametrize(
    "runner", [pytest.param("v1", marks=ON["mtpc on V1"]), pytest.param("v2", marks=ON["mtpc on V2"])]
)
def test_number_of_drafts_follows_an_injected_clock(runner: str) -> None:
    """Drafts that cost nothing are all made; where each costs five steps none is made but for trials."""
    arguments = {"max_model_len": 96, "max_num_seqs": 1}
    planned = {
        name: build(DEMO, "btree", CALLS, name, {KEY: None}, **arguments) for name in ("free drafts", "dear drafts")
    }
    replies = run({"plain": build(DEMO, None, CALLS, **arguments), **planned}, runner)
    chosen = {name: [k for reply in replies[name] for k in reply.recorded] for name in planned}
    for name in planned:
        assert [reply.tokens for reply in replies[name]] == [reply.tokens for reply in replies["plain"]]
    late = {name: drafts[len(drafts) // 2 :] for name, drafts in chosen.items()}  # before, all numbers are tried once
    assert late["free drafts"].count(DRAFTS) >= 0.6 * len(late["free drafts"])
    assert late["dear drafts"].count(0) >= 0.6 * len(late["dear drafts"])


@pytest.mark.column("mtpc on V1")
def test_step_without_drafts_costs_what_plain_vllm_costs() -> None:
    """Calls of Python functions per step, which repeat where seconds do not; a step that drafts has more of them."""
    calls = [ask([prompt(9)] * batch, 50) for batch in (1, 16)]
    arguments = {"max_model_len": 96, "max_num_seqs": 16}
    engines = {
        name: build(DEMO, head, calls, "calls of steps", {KEY: schedule}, **arguments)
        for name, head, schedule in (("plain", None, None), ("K=0", "btree", [[1, 1024, 0]]), ("K=7", "btree", "off"))
    }
    # the prompt's step and the last ones differ
    means = {name: [mean(one.recorded[2:40]) for one in replies] for name, replies in run(engines, "v1").items()}
    assert np.divide(means["K=0"], means["plain"]).max() <= 1.05
    assert np.divide(means["K=7"], means["plain"]).min() > 1.1


@pytest.mark.column("mtpc on V1")
def test_a_step_calls_the_worker_once() -> None:
    """In a server each call waits for another process; vLLM makes three with drafts, two without."""
    calls = [ask([prompt(9)], 16), ask([prompt(9)], 16, structured_outputs={"regex": "[a-z ]{40}"})]
    engines = {
        name: build(DEMO, head, calls, "calls of the worker", {KEY: schedule}, max_model_len=96)
        for name, head, schedule in (("plain", None, None), ("K=0", "btree", [[1, 1024, 0]]), ("K=7", "btree", "off"))
    }
    both = {"execute_model", "sample_tokens"}  # a grammar is awaited between them
    every = {*both, "take_draft_token_ids"}
    noted = {name: [every & {*reply.recorded} for reply in replies] for name, replies in run(engines, "v1").items()}
    assert noted == {"plain": [both, both], "K=0": [{"execute_model"}, both], "K=7": [{"execute_model"}, both]}
