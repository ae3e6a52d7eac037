"""Requests with a seed are drafted for in full whatever the schedule gives their batch; what that costs the others."""

from __future__ import annotations

import inspect
import timeit
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm.config.parallel import ParallelConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from tests.proposers.test_bad_input import engine_config, made, place  # noqa: F401 (fixtures)
from vllm_mtpc.proposers.seam.derive import derived
from vllm_mtpc.proposers.seam.schedule import KEY
from vllm_mtpc.proposers.seam.scheduler import HeadScheduler
from vllm_mtpc.proposers.v2 import seeded
from vllm_mtpc.proposers.watch import DraftClock

MOST = 7
RANGES = [(1, 2, MOST), (3, 4, 2), (5, 64, 0)]


@dataclass
class Request:
    request_id: str
    seed: int | None = None
    temperature: float = 1.0
    is_prefill_chunk: bool = False
    spec_token_ids: list[int] = field(default_factory=list)
    use_structured_output: bool = False

    @property
    def sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace(seed=self.seed, temperature=self.temperature)

    def is_finished(self) -> bool:
        return False


class Vllm(Scheduler):
    """Of vLLM's scheduler what the test needs."""

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        for name in scheduler_output.num_scheduled_tokens:
            self.requests[name].spec_token_ids = [-1] * scheduler_output.num_spec_tokens_to_schedule

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        for name, drafts in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            self.requests[name].spec_token_ids = drafts


def scheduler(*requests: Request, is_async: bool = True, is_v2: bool = True) -> HeadScheduler:
    one = object.__new__(derived(HeadScheduler, Vllm))
    one.requests, one.seeded, one.usual, one.num_spec_tokens = {}, set(), MOST, MOST
    one.is_mtpc_on_v2, one.dynamic_sd_lookup = is_v2, [0, MOST, MOST, 2, 2]
    one.scheduler_config = SimpleNamespace(async_scheduling=is_async)
    for request in requests:
        one.add_request(request)
    return one


def step(one: HeadScheduler, names: str, usual: int) -> int:
    """A step of these requests, for which the schedule has `usual` drafts: what the worker is asked for."""
    output = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1), num_spec_tokens_to_schedule=usual)
    one._update_after_schedule(output)
    return output.num_spec_tokens_to_schedule


def planned(one: HeadScheduler) -> dict[str, int]:
    return {name: len(request.spec_token_ids) for name, request in one.requests.items()}


def test_only_requests_with_a_seed_are_planned_beyond_the_schedule() -> None:
    one = scheduler(Request("a"), Request("s", seed=0), Request("g", seed=1, temperature=0.0), Request("b"))
    assert step(one, "asgb", 2) == MOST
    assert planned(one) == {"a": 2, "s": MOST, "g": 2, "b": 2}  # a greedy request's text depends on nothing
    assert step(one, "agb", 2) == 2, "it waits, or was preempted"
    one.requests["s"].is_prefill_chunk = True
    assert step(one, "asgb", 2) == 2, "its prompt is not read to its end"
    del one.requests["s"]
    assert step(one, "agb", 2) == 2 and one.seeded == set(), "it has ended"


def test_with_synchronous_scheduling_the_drafts_are_cut() -> None:
    one = scheduler(Request("a"), Request("s", seed=0), is_async=False)
    assert step(one, "as", 2) == MOST
    drafts = SimpleNamespace(req_ids=["a", "s"], draft_token_ids=[list(range(MOST)), list(range(MOST))])
    one.update_draft_token_ids(drafts)
    assert planned(one) == {"a": 2, "s": MOST}


def test_other_proposers_are_not_concerned() -> None:
    one = scheduler(Request("s", seed=0), is_v2=False)
    assert step(one, "s", 2) == 2 and planned(one) == {"s": 2}


def test_a_step_without_seeds_looks_at_no_request() -> None:
    """vLLM's own loop over them left aside, a step of 1,024 requests costs what one of one does."""
    one = scheduler(*(Request(str(index)) for index in range(1024)))
    names = dict.fromkeys(one.requests, 1)

    class Plain(Vllm):
        def _update_after_schedule(self, scheduler_output: Any) -> None: ...

    one.__class__ = derived(HeadScheduler, Plain)
    output = SimpleNamespace(num_scheduled_tokens=names, num_spec_tokens_to_schedule=0)
    seconds = min(timeit.repeat(lambda: one._update_after_schedule(output), number=1000, repeat=20)) / 1000
    assert seconds < 2e-6  # 63 to 235 us when running requests were scanned


@dataclass
class Batch:
    """Of vLLM's InputBatch what a speculator reads."""

    req_ids: list[str]
    num_reqs: int
    num_reqs_after_padding: int
    idx_mapping: Tensor
    idx_mapping_np: np.ndarray
    query_start_loc: Tensor


class Speculator:
    """Draft k of a request is 100 * its last row + k, its confidence that over 10,000; notes what it is asked for."""

    def __init__(self, num_reqs: int) -> None:
        self.draft_tokens = torch.full((num_reqs, MOST), -5)
        self.draft_token_confidence_probs = torch.zeros(num_reqs, MOST)
        self.clock, self.asked = DraftClock(), []

    def propose(
        self,
        input_batch: Batch,
        attn_metadata: None,
        slot_mappings: None,
        last_hidden_states: Tensor,
        aux_hidden_states: None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        *given: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **others: Any,
    ) -> Tensor:
        batch, count = input_batch.num_reqs, MOST if num_speculative_tokens is None else num_speculative_tokens
        self.asked.append((batch, count))
        rows = input_batch.query_start_loc[1:] - num_rejected - 1
        self.draft_tokens[:batch, :count] = 100 * rows[:, None] + torch.arange(count)
        self.draft_token_confidence_probs[:batch, :count] = self.draft_tokens[:batch, :count] / 10_000
        return self.draft_tokens[:batch]


@pytest.fixture(name="runner")
def fixture_runner(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of 10 requests those in slots 9, 5 and 2 have a seed; the one in slot 2 is greedy."""
    monkeypatch.setattr(seeded, "MtpcSpeculator", Speculator)
    spec = SimpleNamespace(method="mtpc", num_speculative_tokens=MOST, **{KEY: RANGES})
    set_, temperature = np.zeros(10, dtype=bool), np.ones(10)
    set_[[9, 5, 2]], temperature[2] = True, 0
    states = SimpleNamespace(seeds_set=set_, temperature=SimpleNamespace(np=temperature))
    one = SimpleNamespace(speculative_config=spec, max_num_reqs=10, sampler=SimpleNamespace(sampling_states=states))
    one.speculator = Speculator(10)
    seeded.draft_apart(one)
    return one


def propose(runner: SimpleNamespace, num_reqs: int, asked: int | None, **more: Any) -> Tensor:
    """Requests in slots num_reqs - 1 .. 0, of three rows each, of which the last was rejected."""
    slots = np.arange(num_reqs)[::-1].copy()
    ends = 3 * torch.arange(num_reqs + 1)
    batch = Batch([str(one) for one in slots], num_reqs, num_reqs, torch.from_numpy(slots), slots, ends)
    ones = torch.ones(num_reqs, dtype=torch.int64)
    return runner.speculator.propose(batch, None, None, None, None, ones, ones, num_speculative_tokens=asked, **more)


def test_only_rows_with_a_seed_are_drafted_beyond_the_schedule(runner: SimpleNamespace) -> None:
    drafts = propose(runner, 10, MOST)
    assert runner.speculator.asked == [(10, 0), (2, MOST)]  # 2 x 8 rows of lm_head in the place of 10 x 8
    for row in (0, 4):  # slots 9 and 5
        assert drafts[row].tolist() == [100 * (3 * row + 1) + k for k in range(MOST)]
        confidences = runner.speculator.draft_token_confidence_probs[row].tolist()
        assert confidences == pytest.approx([one / 10_000 for one in drafts[row].tolist()])
    assert runner.speculator.clock.cuts.schedule == 8 * MOST


def test_a_scheduled_batch_is_drafted_for_at_once(runner: SimpleNamespace) -> None:
    propose(runner, 4, 2)
    propose(runner, 2, MOST)
    propose(runner, 10, None, dummy_run=True)
    assert runner.speculator.asked == [(4, 2), (2, MOST), (10, MOST)]


def test_vllm_names_what_it_passes_in_dummy_runs(runner: SimpleNamespace) -> None:
    names = list(inspect.signature(BaseSpeculator.propose).parameters)[1:]
    batch = Batch(["0"], 1, 1, torch.zeros(1), np.zeros(1), torch.tensor([0, 3]))
    given = dict.fromkeys(names) | {"input_batch": batch, "num_rejected": torch.ones(1), "dummy_run": True}
    assert runner.speculator.propose(**given).shape == (1, MOST)


def test_many_seeds_are_drafted_for_a_few_at_a_time(runner: SimpleNamespace) -> None:
    """As many as the schedule drafts for in full: memory was measured with them."""
    runner.sampler.sampling_states.seeds_set[:] = True
    drafts = propose(runner, 10, MOST)
    assert runner.speculator.asked == [(10, 0), *[(2, MOST)] * 4, (1, MOST)]
    drawn = [row for row in range(10) if row != 7]  # slot 2 is greedy
    assert (drafts[drawn, 1] == 100 * (3 * torch.tensor(drawn) + 1) + 1).all()


def test_dense_data_parallel_engines_have_a_schedule(place: Any) -> None:  # noqa: F811
    """Each runs by itself; vLLM takes their schedule away as it must for a mixture of experts."""
    given = {"method": "mtpc", "model": str(place / "head")}
    spec = engine_config(place / "target", {**given, KEY: [[1, 8, 4], [9, 9, 0]]}, data_parallel_size=2)
    assert spec.parallel_config.data_parallel_size == 2
    assert spec.speculative_config.num_speculative_tokens_per_batch_size == [(1, 8, 4), (9, 9, 0)]
    one = engine_config(place / "target", given).speculative_config
    two = engine_config(place / "target", given, data_parallel_size=2).speculative_config
    assert one.has_default_schedule and two.has_default_schedule


@pytest.mark.parametrize("is_moe", [False, True])
def test_experts_that_step_together_have_none(place: Any, is_moe: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from vllm.config.model import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    monkeypatch.setattr(ModelConfig, "is_moe", property(lambda self: is_moe))
    args = EngineArgs(str(place / "target"), speculative_config={"method": "mtpc", "model": str(place / "head")})
    spec = args.create_speculative_config(args.create_model_config(), ParallelConfig(data_parallel_size=2))
    assert spec.num_speculative_tokens_per_batch_size is None  # while vLLM makes the configuration
    spec.take_own_schedule()
    assert (spec.num_speculative_tokens_per_batch_size is None) == is_moe
