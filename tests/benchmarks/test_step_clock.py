"""The clock of a model runner's steps, on runners of Python."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import step_clock
from benchmarks.step_clock import StepClock, draft_method

PART = 0.004  # seconds


class Runner:
    """As a V1 runner: the draft is made inside of sample_tokens. Its time passes when it says so."""

    device, now = torch.device("cpu"), 0.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drafts: bool) -> None:
        monkeypatch.setattr(step_clock, "time", SimpleNamespace(perf_counter=lambda: self.now))
        self.speculative_config = object() if drafts else None

    def execute_model(self, scheduler_output: Any) -> None:
        self.now += PART

    def sample_tokens(self, grammar: Any) -> None:
        self.now += PART
        if self.speculative_config:
            self.propose_draft_token_ids()

    def propose_draft_token_ids(self) -> None:
        self.now += 2 * PART

    def run(self, tokens: dict[str, int], drafts: dict[str, int], new: tuple[str, ...] = (), count: int = 1) -> None:
        """`count` steps of these numbers of tokens and drafts by request."""
        step = SimpleNamespace(
            num_scheduled_tokens=tokens,
            scheduled_spec_decode_tokens={name: [0] * count for name, count in drafts.items()},
            scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        )
        for _ in range(count):
            self.execute_model(step)
            self.sample_tokens(None)


@pytest.mark.parametrize("drafts", [True, False])
def test_parts_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch, drafts: bool) -> None:
    runner = Runner(monkeypatch, drafts)
    clock = StepClock(runner)
    runner.run({"a": 4, "b": 3}, {"a": 3, "b": 2}, count=10)
    steps = clock.read()
    assert (steps.count, steps.request_steps, steps.rows) == (10, 20, 70)
    for value, parts in ((steps.target_ms, 2), (steps.draft_ms, 2 * drafts), (steps.step_ms, 2 + 2 * drafts)):
        assert value == pytest.approx(1000 * PART * parts)
    assert drafts or draft_method(runner) == (None, "")


def test_steps_that_read_a_prompt_are_not_timed_but_their_requests_count(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(monkeypatch, drafts=False)
    clock = StepClock(runner)
    runner.run({"a": 7}, {}, new=("a",))
    runner.run({"a": 1, "b": 1}, {}, new=("b",))
    runner.run({"a": 5}, {"a": 2})  # more tokens than drafts and one: a prompt in pieces
    assert clock.read() is None
    runner.run({"a": 1, "b": 1}, {}, count=3)
    steps = clock.read()
    assert (steps.count, steps.request_steps, steps.rows) == (3, 7, 7)
