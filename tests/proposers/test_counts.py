"""Steps and pruned drafts, from the worker to the log and /metrics."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_mtpc import plugin
from vllm_mtpc.proposers.patches import patch, vllm_patches
from vllm_mtpc.proposers.patches.scheduler import HeadScheduler
from vllm_mtpc.proposers.worker import counts
from vllm_mtpc.proposers.worker.derive import derived


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    plugin.register()
    patch.apply(*vllm_patches.WITH_HEAD)


def sent(stats: Any) -> SimpleNamespace:
    return SimpleNamespace(scheduler_stats=SimpleNamespace(spec_decoding_stats=stats))


def scheduler_that(answers: list[dict[int, Any]]) -> HeadScheduler:
    class Answering(Scheduler):
        def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
            return answers.pop(0)

    made = object.__new__(derived(HeadScheduler, Answering))
    made.log_stats, made.num_spec_tokens, made.drafts_asked, made.requests = True, 3, {}, {}
    made.kinds, made.counts, made.counted_steps = {}, Counter(), 0
    made.use_v2_model_runner, made.verifies_forbidden = False, True
    return made


def test_scheduler_counts_unscheduled_drafts_on_model_runner_v2() -> None:
    """Request b asked for one draft, request d is not in the step."""
    scheduler = scheduler_that([{0: sent(stats := SpecDecodingStats.new(3))}])
    scheduler.use_v2_model_runner, scheduler.drafts_asked = True, {"b": 1, "d": 0}
    step = SimpleNamespace(
        scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=2, num_scheduled_tokens=dict.fromkeys("abc", 1)
    )
    scheduler.plan = None
    scheduler.update_from_output(step, SimpleNamespace(req_ids="abc", sampled_token_ids=[[5], [], [7, 8]]))
    assert +counts.read_counts(stats) == {"steps": 2, "schedule": 2, "request": 2}


def test_the_log_says_tokens_per_step_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.metrics.loggers import SpecDecodingLogging

    now = 1000.0
    monkeypatch.setattr(counts, "time", SimpleNamespace(monotonic=lambda: now))
    logging, said = SpecDecodingLogging(), []

    def log_after(seconds: float) -> list[str]:
        nonlocal now
        now += seconds
        said.clear()
        logging.log(log_fn=lambda text, *values: said.append(text % values))
        return said

    def step(drafts: int, given: dict[str, int]) -> None:
        stats = SpecDecodingStats.new(2)
        for _ in range(drafts):
            stats.observe_draft(2, 1)
        counts.append_counts(stats, given)
        logging.observe(stats)

    classes = {"greedy steps": 3, "sampled steps": 1, "greedy accepted_tokens": 1}
    for _ in range(2):
        step(1, {"steps": 4, "budget": 4, **classes})
    theirs, line = log_after(7)
    assert theirs.startswith("SpecDecoding metrics: Mean acceptance length: 2.00")  # vLLM's: of steps with drafts
    assert line == (
        "Drafts of the last 7 s: 1.25 tokens/step over all 8 steps (greedy 1.33, sampled 1.00), without drafts 1.00; "
        "of 2 per step 0.5 were verified and 0.2 accepted; pruned by budget 50%"
    )
    step(0, {"steps": 3, "schedule": 6, "step_us": 2000, "trial_us": 10})
    assert log_after(10) == []  # a minute is not over
    (line,) = log_after(50)
    assert "last 60 s: 1.00 tokens/step over all 3 steps, without" in line
    assert line.endswith("pruned by schedule 100%; trials of other numbers cost 0.5%")
    assert log_after(60) == []
