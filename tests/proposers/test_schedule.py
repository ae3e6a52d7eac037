"""Drafts by batch size: what may be written, what holds by default, and that text does not depend on it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config.parallel import ParallelConfig
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.support.configs import engine_config, ptp_config
from tests.support.engine import DEMO, Call, build, run
from vllm_mtpc import demo
from vllm_mtpc.checkpoint.metadata import measured_acceptance
from vllm_mtpc.plan import draft_schedule as schedule
from vllm_mtpc.plan.draft_schedule import draft_arms
from vllm_mtpc.plan.row_groups import most_drafts
from vllm_mtpc.proposers.options import ptp_options as config_ptp
from vllm_mtpc.proposers.patches.patch import derived
from vllm_mtpc.proposers.v1.proposer import MtpcProposer
from vllm_mtpc.proposers.v2.model_runner_v2 import HeadModelRunner

KEY = schedule.KEY
PASSES = pytest.mark.parametrize(("variant", "draft_pass"), [("o-ptp", "merged"), ("c-ptp", "two-pass")])
CODE = b'def read(path):\n    """Return the text of a file."""\n    with open(path) as file:\n'


def served(place: Path, **given: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given = {"method": "mtpc", "model": str(place / "head"), **given}
    args = EngineArgs(str(place / "target"), speculative_config=given, skip_tokenizer_init=True)
    config = args.create_speculative_config(args.create_model_config(), ParallelConfig())
    return config.num_speculative_tokens_per_batch_size


SYNTHETIC = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5] * 4}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({KEY: [[9, 64, 0], [1, 8, 4]]}, [(1, 8, 4), (9, 64, 0)]),
        ({KEY: "off"}, None),
        ({KEY: False}, None),
        (SYNTHETIC, None),  # prescribed acceptance has no default
        ({**SYNTHETIC, KEY: [[1, 8, 4]]}, [(1, 8, 4)]),
    ],
)
def test_valid_schedule_is_served(place: Path, given: dict[str, Any], taken: Any) -> None:
    assert served(place, **given) == taken


def test_the_default_allows_all_drafts_on_a_cpu(place: Path) -> None:
    assert served(place) == [(1, schedule.LARGEST, 4)]
    assert served(place, num_speculative_tokens=2) == [(1, schedule.LARGEST, 2)]


def lengths(ranges: schedule.Schedule) -> set[int]:
    return {drafts for _, _, drafts in ranges}


@pytest.mark.parametrize("is_cpu", [True, False])
def test_prior_costs_grow_with_drafts_and_requests(is_cpu: bool) -> None:
    costs = schedule.prior_costs((0, 1, 3, 7), None, 64, 0.5, is_cpu)[1:]
    assert (np.diff(costs, axis=1) > 0).all() and (np.diff(costs, axis=0) >= 0).all()
    assert (schedule.prior_costs((0, 7), None, 64, 1.2, is_cpu)[1:] >= costs[:, [0, 3]]).all()  # of a larger head
    one = schedule.prior_costs((0, 7), None, 1, 2.0, is_cpu)[1]  # of twice the target's weights for each draft
    assert one[1] > 3 * one[0]


def test_prior_costs_of_drafts_that_are_not_allowed_are_infinite() -> None:
    ranges = [(1, 2, 7), (3, 4, 2), (5, 5, 0)]
    allowed = np.isfinite(schedule.prior_costs((0, 2, 7), ranges, 5, 0.5, False)).tolist()
    assert allowed[1:] == [[True, True, True]] * 2 + [[True, True, False]] * 2 + [[True, False, False]]
    exact = np.isfinite(schedule.prior_costs((0, 2, 7), ranges, 5, 0.5, False, is_exact=True)).tolist()
    assert exact[1:] == [[True, False, True]] * 2 + [[True, True, False]] * 2 + [[True, False, False]]


def test_tables_and_ranges() -> None:
    assert schedule.merge_ranges([4, 4, 1, 0, 0]) == [(1, 2, 4), (3, 3, 1), (4, 5, 0)]
    assert schedule.limit_lengths([7, 7, 5, 4, 4, 4, 0]) == [7, 7, 4, 4, 4, 4, 0]
    assert schedule.limit_lengths([7, 2, 0]) == [7, 2, 0]


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "{}", '{"figures": {"t1": {"per_position": ["a"]}}}', '{"figures": {"t1": {}}}',
             '{"figures": {"t1": {"per_position": [1.5]}}}', '{"figures": {"t1": {"per_position": [NaN]}}}'],
)  # fmt: skip
def test_figures_are_read_unless_damaged(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "provenance.json").write_text(text)
    assert measured_acceptance(tmp_path) == {}
    written = json.loads((demo.path("btree") / "provenance.json").read_text())["figures"]
    assert measured_acceptance(demo.path("btree"))["t1"] == written["t1"]["per_position"]


@PASSES
def test_ptp_rows_follow_the_schedule(variant: str, draft_pass: str) -> None:
    spec = ptp_config(variant, draft_pass, [[1, 2, 7], [3, 4, 0], [5, 8, 2]])
    plan, full = spec.plan(8), spec._plan_for(7, 8)
    assert plan.bucket(2).rows == full.bucket(2).rows > plan.bucket(8).rows > 0
    assert plan.bucket(3) is None and plan.bucket(4) is None  # and not the bucket of the batch above
    assert most_drafts(plan.bucket(8), variant, plan.leading) == 2
    if draft_pass == "merged":  # a step may verify what a smaller batch drafted
        assert {len(bucket.sizes) for bucket in plan.buckets} == {8}
    assert plan.max_rows <= full.max_rows and plan.max_groups <= full.max_groups


@PASSES
def test_the_default_of_ptp_loses_nothing(variant: str, draft_pass: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of its plan still drafts; columns that no row fills are not verified. On a GPU it has few lengths."""
    spec = ptp_config(variant, draft_pass, None)
    full = spec.plan(300)
    spec.num_speculative_tokens_per_batch_size = spec.default_schedule()
    ours = spec.plan(300)
    for batch in range(1, 301):
        one, other = full.bucket(batch), ours.bucket(batch)
        assert (one is None) == (other is None), batch
        assert one is None or one.sizes[0] == other.sizes[0]
    every = spec.num_speculative_tokens_per_batch_size
    assert every[-1][2] == 0
    spec.num_speculative_tokens_per_batch_size = None
    monkeypatch.setattr(config_ptp, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    few = spec.default_schedule()
    assert len(lengths(few)) == schedule.GPU_LENGTHS < len(lengths(every))
    assert (few[0][2], few[-1][2]) == (every[0][2], every[-1][2])


def test_a_step_without_drafts_does_not_run_the_head() -> None:
    proposer = object.__new__(MtpcProposer)  # without a model: running it would raise
    proposer.num_drafts, proposer.pruned, proposer.made, proposer.asked = 7, Counter(), {"a": 3}, {}
    requests = {name: SimpleNamespace(sampling_params=None) for name in "ab"}
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b"]), requests=requests)
    sampling = SimpleNamespace(generators={}, all_greedy=True)
    step = SimpleNamespace(scheduled_new_reqs=[], total_num_scheduled_tokens=2, num_spec_tokens_to_schedule=0)
    assert proposer.propose(runner, [[1], [2, 3]], sampling, None, None, step) == [[], []]
    assert runner._draft_probs is None and runner._draft_prob_req_ids is None
    assert proposer.pruned == {"schedule": 14, "budget": 3, "request": 0}


# requests of different length end one after the other: the batch shrinks through every range
SHRINKING = [[1, 1, 7], [2, 2, 3], [3, 3, 1], [4, 8, 0]]
OPTIONS: dict[str, dict[str, Any]] = {
    "off": {KEY: "off", "min_acceptance": 0},
    "shrinking": {KEY: SHRINKING, "min_acceptance": 0},
    "never": {KEY: [[1, 8, 0]]},
    "pruned": {KEY: "off", "min_acceptance": 0.6},
}


def test_text_does_not_depend_on_schedule_or_pruning() -> None:
    """Greedy and seeded; the test of seeds has schedules on V2."""
    prompts, kinds = [list(CODE[start : start + 12]) for start in range(8)], ({}, {"temperature": 0.9, "seed": 11})
    sampling = [{"temperature": 0.0, "ignore_eos": True, **kinds[index % 2]} for index in range(8)]
    call = Call(prompts, [{**one, "max_tokens": 6 * (index + 1)} for index, one in enumerate(sampling)])
    engines = {name: build(DEMO, "btree", [call], spec=spec, max_model_len=128) for name, spec in OPTIONS.items()}
    replies = {name: reply for name, (reply,) in run(engines, "v1").items()}
    every, shrinking, pruned = (replies[name] for name in ("off", "shrinking", "pruned"))
    assert replies["never"].drafted == 0  # plain decoding
    for name, reply in replies.items():
        assert reply.tokens == replies["never"].tokens, name
    assert 1 < shrinking.drafted / shrinking.steps < 7  # of different lengths
    assert max(shrinking.drafted, pruned.drafted) < every.drafted
    assert every.accepted / every.drafted < pruned.accepted / pruned.drafted


@pytest.mark.parametrize("is_moe", [False, True])
def test_dense_data_parallel_engines_have_a_schedule(place: Any, is_moe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts step together and have none; vLLM takes the schedule of dense engines too, which is restored."""
    from vllm.config.model import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    given = {"method": "mtpc", "model": str(place / "head")}
    if not is_moe:
        spec = engine_config(place / "target", {**given, KEY: [[1, 8, 4], [9, 9, 0]]}, data_parallel_size=2)
        assert spec.speculative_config.num_speculative_tokens_per_batch_size == [(1, 8, 4), (9, 9, 0)]
    monkeypatch.setattr(ModelConfig, "is_moe", property(lambda self: is_moe))
    args = EngineArgs(str(place / "target"), speculative_config=given)
    spec = args.create_speculative_config(args.create_model_config(), ParallelConfig(data_parallel_size=2))
    assert spec.num_speculative_tokens_per_batch_size is None  # while vLLM makes the configuration
    spec.restore_own_schedule()
    assert (spec.num_speculative_tokens_per_batch_size is None) == is_moe


@pytest.mark.parametrize("num_drafts", [1, 5, 7, 31])
def test_every_planned_number_of_drafts_has_graphs_of_the_target(num_drafts: int) -> None:
    """Up to the rows of vLLM's largest graph, also where no batch is large enough for fewer drafts."""
    ranges, arms = schedule.gpu_schedule(num_drafts), set(draft_arms(num_drafts))
    assert lengths(ranges) == arms
    assert all(
        (high + 1) * (1 + drafts) > schedule.GRAPH_ROWS >= high * (1 + drafts) for _, high, drafts in ranges[:-1]
    )
    found: set[int] = set()

    class Runner(GPUModelRunner):
        def initialize_kv_cache(self) -> None:
            found.update(build_dynamic_sd_schedule_lookup(vars(self.speculative_config)[KEY], 8, num_drafts)[1:])

    runner = object.__new__(derived(HeadModelRunner, Runner))
    runner.speculative_config = SimpleNamespace(**{KEY: ranges}, arms=draft_arms(num_drafts))
    runner.initialize_kv_cache()
    assert found == arms and vars(runner.speculative_config)[KEY] == ranges
