"""The clock of a model runner's steps, on runners of Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import step_clock
from benchmarks.step_clock import StepClock, draft_method, runner_of

PART = 0.004  # seconds


class Runner:
    """As a V1 runner: the draft is made inside of sample_tokens. Its time passes when it says so."""

    device, now = torch.device("cpu"), 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drafts: bool) -> None:
        monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.speculative_config = object() if drafts else None

    def execute_model(self, scheduler_output: Any) -> str:
        self.now += PART
        return "executed"

    def sample_tokens(self, grammar: Any) -> str:
        self.now += PART
        if self.speculative_config:
            self.propose_draft_token_ids()
        return "sampled"

    def propose_draft_token_ids(self) -> str:
        self.now += 2 * PART
        return "drafted"


def scheduled(tokens: dict[str, int], drafts: dict[str, int] | None = None, new: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens={name: [0] * count for name, count in (drafts or {}).items()},
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
    )


def run(runner: Runner, steps: list[Any]) -> None:
    for step in steps:
        assert runner.execute_model(step) == "executed"
        assert runner.sample_tokens(None) == "sampled"


def test_parts_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(monkeypatch, drafts=True)
    clock = StepClock(runner)
    run(runner, [scheduled({"a": 4, "b": 3}, {"a": 3, "b": 2})] * 10)
    steps = clock.read()
    assert (steps.count, steps.request_steps, steps.rows) == (10, 20, 70)
    for value, expected in ((steps.target_ms, 2), (steps.draft_ms, 2), (steps.step_ms, 4)):
        assert value == pytest.approx(1000 * PART * expected)


def test_without_drafts_nothing_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(monkeypatch, drafts=False)
    clock = StepClock(runner)
    run(runner, [scheduled({"a": 1})] * 4)
    assert clock.read().draft_ms == 0.0 and draft_method(runner) == (None, "")


def test_steps_that_read_a_prompt_are_not_timed_but_their_requests_count(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(monkeypatch, drafts=False)
    clock = StepClock(runner)
    chunk = scheduled({"a": 5}, {"a": 2})  # more tokens than drafts and one: a prompt in pieces
    run(runner, [scheduled({"a": 7}, new=("a",)), scheduled({"a": 1, "b": 1}, new=("b",)), chunk])
    assert clock.read() is None
    run(runner, [scheduled({"a": 1, "b": 1})] * 3)
    steps = clock.read()
    assert (steps.count, steps.request_steps, steps.rows) == (3, 7, 7)
    clock.records.clear()
    assert clock.read() is None


def test_the_runner_of_an_engine_in_another_process_is_not_to_be_had() -> None:
    elsewhere = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace()))
    assert runner_of(elsewhere) is None
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner="runner"))
    core = SimpleNamespace(engine_core=SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker)))
    assert runner_of(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))) == "runner"
