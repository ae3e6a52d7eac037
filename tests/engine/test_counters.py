"""Counters of vLLM turned into tokens per step and acceptance per position."""

from __future__ import annotations

import pytest

from vllm_mtpc.engine.counters import Acceptance

PROMETHEUS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="demo"} 10.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="demo"} 1.76e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="demo"} 30.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="demo"} 15.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="demo",position="2"} 1.0
vllm:generation_tokens_total{engine="0",model_name="demo"} 25.0
"""


def test_metrics_of_a_server_are_read() -> None:
    read = Acceptance.read(PROMETHEUS)
    assert read == Acceptance(10, 30, 15, (9, 5, 1))
    assert read.tokens_per_step == 2.5
    assert read.per_position == (0.9, 0.5, 0.1)


def test_counters_of_engines_are_added() -> None:
    both = Acceptance.read(PROMETHEUS + PROMETHEUS.replace('engine="0"', 'engine="1"'))
    assert both == Acceptance(20, 60, 30, (18, 10, 2))


def test_tokens_per_step_is_over_all_steps() -> None:
    """Ten steps in sixty drafted: the fifty others count, also in sums."""
    text = PROMETHEUS + (
        'vllm:spec_decode_steps_total{engine="0",model_name="demo"} 60.0\n'
        'vllm:spec_decode_drafts_pruned_total{by="schedule",engine="0",model_name="demo"} 80.0\n'
        'vllm:spec_decode_drafts_pruned_total{by="confidence",engine="0",model_name="demo"} 10.0\n'
    )
    read = Acceptance.read(text)
    assert read == Acceptance(10, 30, 15, (9, 5, 1), 60, (80, 10, 0, 0))
    assert read.tokens_per_step == 1.25 and read.tokens_per_drafted_step == 2.5
    assert read.pruned_line() == "drafts pruned: schedule 67 %, confidence 8 %, budget 0 %, request 0 %"
    assert (read + read).tokens_per_step == 1.25 and (read + read - read) == read
    assert Acceptance().pruned_line() == ""


def test_earlier_counters_are_subtracted() -> None:
    assert Acceptance(10, 30, 15, (9, 5, 1)) - Acceptance() == Acceptance(10, 30, 15, (9, 5, 1))
    assert Acceptance(10, 30, 15, (9, 5, 1)) - Acceptance(4, 12, 6, (4, 2, 0)) == Acceptance(6, 18, 9, (5, 3, 1))


def test_plain_decoding_is_one_token_per_step() -> None:
    plain = Acceptance.read("vllm:generation_tokens_total 25.0\n")
    assert plain.tokens_per_step == pytest.approx(1.0)
    assert plain.per_position == ()
