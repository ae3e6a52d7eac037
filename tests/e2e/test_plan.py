"""The online plan in an engine of either runner: K follows the seconds of steps, and the text is plain vLLM's."""

from __future__ import annotations

import pytest

from tests.support.engine import DEMO, ask, build, run
from tests.support.requests import prompt
from vllm_mtpc.plan.draft_schedule import SCHEDULE_KEY

DRAFTS = 7  # of the demo's head
CALLS = [ask([prompt(12, at)], 80) for at in range(3)]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_number_of_drafts_follows_an_injected_clock(runner: str) -> None:
    """Drafts that cost nothing are all made; where each costs five steps none is made but for trials."""
    arguments = {"max_model_len": 96, "max_num_seqs": 1}
    planned = {
        name: build(DEMO, "btree", CALLS, name, {SCHEDULE_KEY: None}, **arguments)
        for name in ("free drafts", "dear drafts")
    }
    replies = run({"plain": build(DEMO, None, CALLS, **arguments), **planned}, runner)
    chosen = {name: [k for reply in replies[name] for k in reply.recorded] for name in planned}
    for name in planned:
        assert [reply.tokens for reply in replies[name]] == [reply.tokens for reply in replies["plain"]]
        last = replies[name][-1]  # all steps are counted, also those that verify nothing: a token each, and drafts
        assert 0 <= last.metrics["vllm:spec_decode_steps"] + last.accepted - 3 * 80 <= 3 * DRAFTS
    late = {name: drafts[len(drafts) // 2 :] for name, drafts in chosen.items()}  # before, all numbers are tried once
    assert late["free drafts"].count(DRAFTS) >= 0.6 * len(late["free drafts"])
    assert late["dear drafts"].count(0) >= 0.6 * len(late["dear drafts"])
