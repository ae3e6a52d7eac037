"""The fast interpreter writes what Triton's own writes, bit for bit; fallbacks and errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import forks
from tests.support.engine import DEMO, Call, Engine, Reply, answers, build
from tests.support.interpreted import launched_kernels

Report = dict[str, dict[str, Any]]  # numpy_interpreter.check.REPORT
OURS = launched_kernels("kernels")
VLLMS = {
    "block_table": "compute_slot_mappings gather_block_tables",
    "buffer_utils": "apply_write",
    "input_batch": "combine_sampled_and_draft_tokens expand_idx_mapping get_num_sampled_and_rejected post_update "
    "prepare_pos_seq_lens prepare_prefill_inputs",
    "sample.bad_words": "bad_words",
    "sample.gumbel": "gumbel_sample temperature",
    "sample.logit_bias": "bias",
    "sample.logprob": "ranks topk_log_softmax",
    "sample.penalties": "bincount penalties",
    "sample.prompt_logprob": "prompt_logprobs_token_ids",
    "spec_decode.rejection_sampler": "flatten_sampled gather_draft_sampled",
    "spec_decode.rejection_sampler_utils": "compute_local_logits_stats insert_resampled rejection resample",
    "structured_outputs": "apply_grammar_bitmask",
}
SERVED = {f"vllm.v1.worker.gpu.{module}._{name}_kernel" for module, names in VLLMS.items() for name in names.split()}
SERVED |= {"vllm_mtpc.kernels.draft.launches.draft_rows", "vllm_mtpc.proposers.v2.gather.gather_inputs"}
KERNELS = "tests.support.own_kernels"
FALLS_BACK = {f"{KERNELS}.sorts", "vllm_mtpc.kernels.pick.kernel._rate_blocks"}  # the latter for tl.erf

CODE = list(b"import os\n\n\ndef walk(path):\n    ")
PROMPTS = [CODE, CODE[:9], list(b"class Reader:\n"), list(b"x = ")]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}

ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 4, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "seed": 5},
    {"temperature": 0.0, "bad_words": ["import os"], "prompt_logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": list(range(97, 123)), "seed": 6},
    {"temperature": 0.7, "min_tokens": 6, "stop_token_ids": [10], "logprobs": 0, "seed": 10},
    {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}, "seed": 7},
]


def serve(mode: str, max_tokens: int, head: str = "btree", **spec: Any) -> tuple[Reply, Report]:
    """The reply of an engine with an interpreter, and what comparing launches found."""
    call = Call(PROMPTS * 2, [{"max_tokens": max_tokens, **one} for one in ASKED])
    options = {"backend": "xgrammar", "disable_any_whitespace": True}
    engine = build(DEMO, head, [call], spec=spec, max_model_len=128, structured_outputs_config=options)
    return forks.call("v2", "tests.interpreter.test_equal:_serve", engine, MTPC_INTERPRETER=mode)


def _serve(engine: Engine) -> tuple[Reply, Report]:
    from numpy_interpreter.check import REPORT

    found = answers({"": engine})[""]
    assert not isinstance(found, str), found
    return found[0], REPORT


@pytest.fixture(scope="module")
def own() -> tuple[Report, dict[str, Report]]:
    """Few unit-test inputs of every kernel; of each set of constants and dtypes one launch."""
    return forks.call("v2", f"{KERNELS}:compare", True, MTPC_INTERPRETER="check-once")


def assert_equal(report: Report, expected: set[str]) -> None:
    """`expected`: names of kernels, with or without their modules."""
    names = report.keys() | {name.rpartition(".")[2] for name in report}
    assert not expected - names, "kernels that were not launched"
    assert {name for name, entry in report.items() if entry["fell_back"]} == FALLS_BACK & report.keys()
    assert not {name: entry["differs"] for name, entry in report.items() if entry["differs"]}
    assert all(entry["compared"] for name, entry in report.items() if name not in FALLS_BACK)


def test_our_kernels_write_the_same_bits(own: tuple[Report, dict[str, Report]]) -> None:
    assert len(OURS) == 16, sorted(OURS)
    assert_equal(own[0], OURS)


def test_injected_fault_is_found(own: tuple[Report, dict[str, Report]]) -> None:
    for fault, report in own[1].items():
        assert any(entry["differs"] for entry in report.values()), fault


@pytest.mark.slow
def test_every_launch_of_ours_writes_the_same_bits() -> None:
    report, _ = forks.call("v2", f"{KERNELS}:compare", False, MTPC_INTERPRETER="check")
    assert_equal(report, OURS)


def test_served_requests_write_the_same_bits() -> None:
    """vLLM's Model Runner V2 with a btree head; of each set of constants and dtypes one launch."""
    assert_equal(serve("check-once", 8)[1], SERVED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "spec"),
    [
        ("btree", {"rejection_sample_method": "block"}),
        ("o-ptp", {"method": "ptp", "draft_pass": "merged"}),
        ("c-ptp", {"method": "ptp", "draft_pass": "two-pass"}),
    ],
)
def test_other_engines_write_the_same_bits(head: str, spec: dict[str, Any]) -> None:
    assert_equal(serve("check-once", 8, head, **spec)[1], set())


@pytest.mark.slow
def test_served_tokens_are_equal_with_all_instances_at_once() -> None:
    """MTPC_INTERPRETER=lanes is equal to rounding, which turns no token here."""
    assert serve("numpy", 16)[0].tokens == serve("lanes", 16)[0].tokens


@pytest.mark.parametrize("function", ["fall_back", "diverge"])
def test_kernels_fall_back_and_diverge(function: str) -> None:
    """A kernel that cannot run here falls back; changed device functions are seen; nothing is written twice.

    All instances at once equal instances in turn: where they diverge, writes are undone before each group runs by
    itself.
    """
    forks.call("v2", f"{KERNELS}:{function}")
