"""Drafts by batch size: what may be written, what holds by default; the groups of PTP's rows.

`tests/e2e/test_ptp.py` reads the states of groups.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import settings
from hypothesis import strategies as st
from vllm.config.parallel import ParallelConfig

from tests.support.configs import engine_config, ptp_config
from vllm_mtpc import demo
from vllm_mtpc.checkpoint.metadata import read_figures
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.heads.ptp.row_groups import plan_groups
from vllm_mtpc.plan import draft_schedule as schedule
from vllm_mtpc.proposers.options import ptp_options as config_ptp

ROOT = Path(__file__).resolve().parents[2]
SCHEDULE_KEY = schedule.SCHEDULE_KEY
PASSES = pytest.mark.parametrize(("variant", "draft_pass"), [("o-ptp", "merged"), ("c-ptp", "two-pass")])


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
        ({SCHEDULE_KEY: [[9, 64, 0], [1, 8, 4]]}, [(1, 8, 4), (9, 64, 0)]),
        ({SCHEDULE_KEY: "off"}, None),
        ({SCHEDULE_KEY: False}, None),
        (SYNTHETIC, None),  # prescribed acceptance has no default
        ({**SYNTHETIC, SCHEDULE_KEY: [[1, 8, 4]]}, [(1, 8, 4)]),
    ],
)
def test_valid_schedule_is_served(place: Path, given: dict[str, Any], taken: Any) -> None:
    assert served(place, **given) == taken


def test_the_default_allows_all_drafts_on_a_cpu(place: Path) -> None:
    assert served(place) == [(1, schedule.LARGEST, 4)]
    assert served(place, num_speculative_tokens=2) == [(1, schedule.LARGEST, 2)]


def lengths(ranges: schedule.Schedule) -> set[int]:
    return {drafts for _, _, drafts in ranges}


def test_prior_costs_of_drafts_that_are_not_allowed_are_infinite() -> None:
    ranges = [(1, 2, 7), (3, 4, 2), (5, 5, 0)]
    allowed = np.isfinite(schedule.prior_costs((0, 2, 7), ranges, 5, 0.5)).tolist()
    assert allowed[1:] == [[True, True, True]] * 2 + [[True, True, False]] * 2 + [[True, False, False]]
    exact = np.isfinite(schedule.prior_costs((0, 2, 7), ranges, 5, 0.5, is_exact=True)).tolist()
    assert exact[1:] == [[True, False, True]] * 2 + [[True, True, False]] * 2 + [[True, False, False]]


def test_prior_costs_of_a_chat_model_are_near_the_measured_ones() -> None:
    """Steps of SmolLM2 (135M) relative to plain vLLM's; the constants are of a byte target.

    0.15: the quartiles of the measured ones are up to an eighth from their median.
    """
    rows = json.loads((ROOT / "benchmarks/results/smollm2-step.json").read_text())["rows"]
    arms = sorted({row["drafts"] for row in rows})
    costs = schedule.prior_costs(arms, None, 16, 0.037, products=1.345e8)
    for row in rows:
        found = costs[row["clients"], arms.index(row["drafts"])] / costs[row["clients"], 0]
        assert found == pytest.approx(row["ratio"][1], rel=0.15), row


@pytest.mark.parametrize(
    "text", [None, "{", "[]", "{}", '{"figures": {"t1": {"per_position": ["a"]}}}', '{"figures": {"t1": {}}}',
             '{"figures": {"t1": {"per_position": [1.5]}}}', '{"figures": {"t1": {"per_position": [NaN]}}}'],
)  # fmt: skip
def test_figures_are_read_unless_damaged(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "provenance.json").write_text(text)
    assert read_figures(tmp_path) == {}
    written = json.loads((demo.path("btree") / "provenance.json").read_text())["figures"]
    assert read_figures(demo.path("btree"))["t1"].per_position == written["t1"]["per_position"]


@PASSES
def test_ptp_rows_follow_the_schedule(variant: str, draft_pass: str) -> None:
    spec = ptp_config(variant, draft_pass, [[1, 2, 7], [3, 4, 0], [5, 8, 2]])
    plan, full = spec.row_groups(8), plan_groups(spec.head, [7] * 8, draft_pass == "two-pass", spec.max_aux_rows)
    rows = list(map(sum, plan.sizes))
    assert rows[1] == sum(full.sizes[1]) > rows[7] > 0
    assert rows[2:4] == [0, 0]  # and not those of the batch above
    assert max(plan.sizes[7]) + plan.leading - spec.head.first_row == 2
    assert {len(sizes) for sizes in plan.sizes} == {8}  # a step may verify what a smaller batch drafted
    assert plan.max_rows <= full.max_rows and plan.max_groups <= full.max_groups


@PASSES
def test_the_default_of_ptp_loses_nothing(variant: str, draft_pass: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of its plan still drafts; columns that no row fills are not verified. On a GPU it has few lengths."""
    spec = ptp_config(variant, draft_pass, None)
    full = spec.row_groups(300)
    spec.num_speculative_tokens_per_batch_size = spec.default_schedule()
    ours = spec.row_groups(300)
    for batch, (one, other) in enumerate(zip(full.sizes, ours.sizes, strict=True), start=1):
        assert any(one) == any(other), batch
        assert one[0] == other[0]
    every = spec.num_speculative_tokens_per_batch_size
    assert every[-1][2] == 0
    spec.num_speculative_tokens_per_batch_size = None
    monkeypatch.setattr(config_ptp, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    few = spec.default_schedule()
    assert len(lengths(few)) == schedule.GPU_LENGTHS < len(lengths(every))
    assert (few[0][2], few[-1][2]) == (every[0][2], every[-1][2])


@pytest.mark.parametrize("is_moe", [False, True])
def test_dense_data_parallel_engines_have_a_schedule(place: Any, is_moe: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts step together and have none; vLLM takes the schedule of dense engines too, which is restored."""
    from vllm.config.model import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    given = {"method": "mtpc", "model": str(place / "head")}
    if not is_moe:
        spec = engine_config(place / "target", {**given, SCHEDULE_KEY: [[1, 8, 4], [9, 9, 0]]}, data_parallel_size=2)
        assert spec.speculative_config.num_speculative_tokens_per_batch_size == [(1, 8, 4), (9, 9, 0)]
    monkeypatch.setattr(ModelConfig, "is_moe", property(lambda self: is_moe))
    args = EngineArgs(str(place / "target"), speculative_config=given)
    spec = args.create_speculative_config(args.create_model_config(), ParallelConfig(data_parallel_size=2))
    assert spec.num_speculative_tokens_per_batch_size is None  # while vLLM makes the configuration
    spec.restore_own_schedule()
    assert (spec.num_speculative_tokens_per_batch_size is None) == is_moe


TARGET = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"]}


def head(variant: str) -> PtpConfig:
    return PtpConfig.create(variant=variant, window=8, target=TARGET, verifier="target", accepted=None)


@settings(max_examples=100, deadline=None, derandomize=True)
@for_all(
    variant=st.sampled_from(["o-ptp", "c-ptp"]),
    drafts=st.integers(1, 7),
    seqs=st.integers(1, 70),
    rows=st.integers(2, 300),
    merged=st.booleans(),
)
def test_plan_keeps_to_max_aux_rows(variant: str, drafts: int, seqs: int, rows: int, merged: bool) -> None:
    plan = plan_groups(head(variant), [drafts] * seqs, not merged, rows)
    for num_reqs, sizes in enumerate(plan.sizes, start=1):
        if not any(sizes):
            assert not any(map(any, plan.sizes[num_reqs:]))
            continue
        # a batch never has more rows than the one of the next power of two
        assert num_reqs * (sum(sizes) + plan.leading) <= max(rows, 2)
        assert num_reqs * sum(map(bool, sizes)) <= plan.max_groups
        assert num_reqs * (sum(sizes) + plan.leading) <= plan.max_rows
        assert max(sizes) + plan.leading <= plan.max_group_rows
        assert len(sizes) == drafts + 1
