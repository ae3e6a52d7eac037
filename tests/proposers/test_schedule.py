"""Drafts by batch size: what may be written, what holds by default, and that text does not depend on it."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config.parallel import ParallelConfig

from tests.support.configs import engine_config, ptp_config
from tests.support.engine import Call, Engine, Reply, run
from vllm_mtpc import demo
from vllm_mtpc.checkpoint.inspect import measured_acceptance
from vllm_mtpc.plan import draft_schedule as schedule
from vllm_mtpc.plan.row_groups import most_drafts
from vllm_mtpc.proposers.config import ptp_options as config_ptp
from vllm_mtpc.proposers.config.circuit_options import MtpcSpeculativeConfig
from vllm_mtpc.proposers.v1.draft_planner import DraftPlanner
from vllm_mtpc.proposers.v1.proposer import MtpcProposer

KEY = schedule.KEY
CODE = b'def read(path):\n    """Return the text of a file."""\n    with open(path) as file:\n'


def served(place: Path, **given: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    given = {"method": "mtpc", "model": str(place / "head"), **given}
    args = EngineArgs(str(place / "target"), speculative_config=given, skip_tokenizer_init=True)
    config = args.create_speculative_config(args.create_model_config(), ParallelConfig())
    return config.num_speculative_tokens_per_batch_size


@pytest.mark.parametrize(
    ("asked", "taken"), [([[9, 64, 0], [1, 8, 4]], [(1, 8, 4), (9, 64, 0)]), ("off", None), (False, None)]
)
def test_valid_schedule_is_served(place: Path, asked: Any, taken: Any) -> None:
    assert served(place, **{KEY: asked}) == taken


def test_the_default_is_on(place: Path) -> None:
    ranges = served(place)
    assert ranges[0][0] == 1 and ranges[0][2] > 0  # a single request is drafted for
    assert ranges[-1][2] == 0  # the largest batches are not
    assert [drafts for _, _, drafts in ranges] == sorted((drafts for _, _, drafts in ranges), reverse=True)
    assert served(place, num_speculative_tokens=2)[0][2] <= 2


def test_prescribed_acceptance_has_no_default(place: Path) -> None:
    rates = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5] * 4}
    assert served(place, **rates) is None
    assert served(place, **rates, **{KEY: [[1, 8, 4]]}) == [(1, 8, 4)]


def expand(ranges: schedule.Schedule, largest: int) -> list[int]:
    return [next(drafts for low, high, drafts in ranges if low <= batch <= high) for batch in range(1, largest + 1)]


def test_the_default_follows_the_head() -> None:
    """A head that is accepted more drafts more, at every batch size; an accepted one at large batches too."""
    poor, good, sure = ([chance**k for k in range(1, 8)] for chance in (0.3, 0.6, 0.95))
    for is_cpu in (True, False):
        lengths = [expand(schedule.default_schedule([rates], 7, is_cpu), 64) for rates in (poor, good, sure)]
        for worse, better in itertools.pairwise(lengths):
            assert all(a <= b for a, b in zip(worse, better, strict=True))
        assert all(max(one) <= 7 for one in lengths)
    useless = schedule.default_schedule([[0.0] * 7], 7, True)
    assert useless == [(1, schedule.LARGEST, 0)]


def test_no_batch_is_expected_to_lose() -> None:
    """The default's own arithmetic: at every batch size its K gains at both temperatures, or is 0."""
    for head in ("ff", "cp", "hmm", "btree"):
        measured = measured_acceptance(demo.path(head)).values()
        assert len(measured) == 2
        for batch, drafts in enumerate(expand(schedule.default_schedule(measured, 7, True), 64), start=1):
            assert drafts == 0 or all(schedule.cpu_gain(one, batch, drafts) >= schedule.MARGIN for one in measured)


def test_a_head_that_multiplies_much_drafts_less() -> None:
    """A shared head of four components puts four products with lm_head into a draft: dear next to a small target."""
    rates = [0.6**k for k in range(1, 8)]
    light, heavy = (expand(schedule.default_schedule([rates], 7, True, load), 64) for load in (0.07, 1.2))
    assert light == expand(schedule.default_schedule([rates], 7, True), 64)
    assert all(less <= more for less, more in zip(heavy, light, strict=True)) and sum(heavy) < sum(light) / 2


def test_tables_and_ranges() -> None:
    assert schedule.cumulative_acceptance([0.8, 0.6], 4) == [0.8, 0.6, 0.3, 0.15]
    assert schedule.cumulative_acceptance([], 2) == [0.5, 0.25]
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


@pytest.mark.parametrize(("variant", "draft_pass"), [("o-ptp", "merged"), ("c-ptp", "two-pass")])
def test_ptp_rows_follow_the_schedule(variant: str, draft_pass: str) -> None:
    spec = ptp_config(variant, draft_pass, [[1, 2, 7], [3, 4, 0], [5, 8, 2]])
    plan, full = spec.plan(8), spec._plan_for(7, 8)
    assert plan.bucket(2).rows == full.bucket(2).rows > plan.bucket(8).rows > 0
    assert plan.bucket(3) is None and plan.bucket(4) is None  # and not the bucket of the batch above
    assert most_drafts(plan.bucket(8), variant, plan.leading) == 2
    if draft_pass == "merged":  # a step may verify what a smaller batch drafted
        assert {len(bucket.sizes) for bucket in plan.buckets} == {8}
    assert plan.max_rows <= full.max_rows and plan.max_groups <= full.max_groups


@pytest.mark.parametrize(("variant", "draft_pass"), [("o-ptp", "merged"), ("c-ptp", "two-pass")])
def test_the_default_of_ptp_loses_nothing(variant: str, draft_pass: str) -> None:
    """Every row of its plan still drafts; columns that no row fills are not verified."""
    spec = ptp_config(variant, draft_pass, None)
    full = spec.plan(300)
    spec.num_speculative_tokens_per_batch_size = spec.default_schedule()
    ours = spec.plan(300)
    for batch in range(1, 301):
        one, other = full.bucket(batch), ours.bucket(batch)
        assert (one is None) == (other is None), batch
        assert one is None or one.sizes[0] == other.sizes[0]
    assert spec.num_speculative_tokens_per_batch_size[-1][2] == 0


def test_a_step_without_drafts_does_not_run_the_head() -> None:
    proposer = object.__new__(MtpcProposer)  # without a model: running it would raise
    proposer.num_drafts, proposer.pruned, proposer.is_debug = 7, Counter(), True
    proposer.planner = DraftPlanner(np.full((2, 7), 0.5), 0.1)
    requests = {name: SimpleNamespace(sampling_params=None) for name in "ab"}
    runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a", "b"]), requests=requests)
    sampling = SimpleNamespace(generators={}, all_greedy=True)
    step = SimpleNamespace(scheduled_new_reqs=[], total_num_scheduled_tokens=2, num_spec_tokens_to_schedule=0)
    assert proposer.propose(runner, [[1], [2, 3]], sampling, None, None, step) == [[], []]
    assert runner._draft_probs is None and runner._draft_prob_req_ids is None
    assert proposer.pruned == {"schedule": 14, "budget": 0, "request": 0}


# requests of different length end one after the other: the batch shrinks through every range
SHRINKING = [[1, 1, 7], [2, 2, 3], [3, 3, 1], [4, 8, 0]]
OPTIONS: dict[str, dict[str, Any]] = {
    "off": {KEY: "off", "min_acceptance": 0},
    "shrinking": {KEY: SHRINKING, "min_acceptance": 0},
    "default": {},  # planned by the costs on this machine: its number of drafts is not tested
    "never": {KEY: [[1, 8, 0]]},
    "pruned": {KEY: "off", "min_acceptance": 0.6},
}
GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9, "seed": 11}


def engine(options: dict[str, Any]) -> Engine:
    prompts = [list(CODE[start : start + 12]) for start in range(4)]
    calls = [
        Call(prompts, [{**how, "ignore_eos": True, "max_tokens": 10 * (index + 1)} for index in range(4)])
        for how in (GREEDY, SEEDED)
    ]
    speculative = {"method": "mtpc", "model": str(demo.path("btree")), **options}
    return Engine(str(demo.path("target")), calls, {"speculative_config": speculative, "max_model_len": 128})


@pytest.fixture(scope="module", params=["v1", pytest.param("v2", marks=pytest.mark.slow)])
def said(request: pytest.FixtureRequest) -> dict[str, list[Reply]]:
    """Replies by options; V2 is interpreted, so only two of them there."""
    names = list(OPTIONS) if request.param == "v1" else ["shrinking", "never"]
    answers = run({name: engine(OPTIONS[name]) for name in names}, request.param, request.param == "v2")
    for name, replies in answers.items():
        assert not isinstance(replies, str), (name, replies)
    return answers


def drafts(reply: Reply) -> float:
    return reply.metrics["vllm:spec_decode_num_draft_tokens"]


def test_greedy_text_does_not_depend_on_schedule_or_pruning(said: dict[str, list[Reply]]) -> None:
    plain = said["never"][0]  # no drafts at all: plain decoding
    assert drafts(plain) == 0
    for name, (greedy, _) in said.items():
        assert greedy.tokens == plain.tokens, name
        if name not in ("never", "default"):
            assert drafts(greedy) > 0, name
    steps = said["shrinking"][0].metrics["vllm:spec_decode_num_drafts"]
    assert 1 < drafts(said["shrinking"][0]) / steps < 7  # of different lengths
    if "off" in said:
        every, pruned = said["off"][0], said["pruned"][0]
        assert drafts(said["shrinking"][0]) < drafts(every) and drafts(pruned) < drafts(every)
        accepted = [one.metrics["vllm:spec_decode_num_accepted_tokens"] / drafts(one) for one in (every, pruned)]
        assert accepted[0] < accepted[1]


def test_seeded_text_does_not_depend_on_schedule_or_pruning(said: dict[str, list[Reply]]) -> None:
    """It is that of plain vLLM."""
    texts = [replies[1].tokens for replies in said.values()]
    assert all(text == texts[0] for text in texts)
    greedy, seeded = said["never"]
    assert drafts(seeded) == drafts(greedy) == 0 and drafts(said["shrinking"][1]) > drafts(said["shrinking"][0])


def test_the_schedule_is_described_in_the_log() -> None:
    def describe(ranges: Any, is_v2: bool = True) -> str:
        spec = SimpleNamespace(
            num_speculative_tokens=7, num_speculative_tokens_per_batch_size=ranges, min_acceptance=None
        )
        return MtpcSpeculativeConfig.describe_drafts(spec, is_v2)

    ranges = [(1, 4, 7), (5, 5, 2), (6, 1024, 0)]
    assert describe(ranges) == "drafts per step by running requests: 7 at 1 to 4, 2 at 5, none from 6 on"
    assert describe([(1, 1024, 3)]) == "drafts per step by running requests: 3 from 1 on"
    assert describe(None) == "7 drafts per step, at any batch size"
    assert "as measured costs and acceptance decide" in describe(None, is_v2=False)


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


def lengths(ranges: schedule.Schedule) -> set[int]:
    return {drafts for _, _, drafts in ranges}


@pytest.mark.parametrize("num_drafts", [1, 3, 7, 15, 31])
def test_default_schedule_has_few_lengths(num_drafts: int) -> None:
    """vLLM captures about 50 graphs of the target for each length."""
    ranges = schedule.default_schedule([], num_drafts, is_cpu=False)
    assert len(lengths(ranges)) <= schedule.GPU_LENGTHS
    assert all(high * (1 + drafts) <= schedule.GPU_FEW_ROWS for _, high, drafts in ranges if drafts)


@pytest.mark.parametrize(("variant", "draft_pass"), [("o-ptp", "merged"), ("c-ptp", "two-pass")])
def test_default_schedule_of_ptp_has_few_lengths(
    variant: str, draft_pass: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ptp_config(variant, draft_pass, None)
    every = spec.default_schedule()
    monkeypatch.setattr(config_ptp, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    few = spec.default_schedule()
    assert len(lengths(few)) == schedule.GPU_LENGTHS < len(lengths(every))
    assert (few[0][2], few[-1][2]) == (every[0][2], every[-1][2])
