"""The fast interpreter writes what Triton's own writes, bit for bit, with every kernel that runs on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import workload

ROOT = Path(__file__).parents[2]
Report = dict[str, dict[str, Any]]  # numpy_interpreter.check.REPORT


def find_kernels() -> set[str]:
    """The kernels of this package: jit functions that are launched; no other function of the package calls them."""
    names = set()
    for path in (ROOT / "kernels").glob("*/*.py"):
        source = path.read_text()
        for name in re.findall(r"^ *(?:\w+\.)?(\w+)\[\(", source, re.M):
            defining = (p for p in path.parent.glob("*.py") if re.search(rf"^def {name}\(", p.read_text(), re.M))
            names |= {f"vllm_mtpc.kernels.{p.parent.name}.{p.stem}.{name}" for p in defining}
    return names


OURS = find_kernels()
VLLMS = {
    f"vllm.v1.worker.gpu.{name}"
    for name in (
        "block_table._compute_slot_mappings_kernel",
        "block_table._gather_block_tables_kernel",
        "buffer_utils._apply_write_kernel",
        "input_batch._combine_sampled_and_draft_tokens_kernel",
        "input_batch._expand_idx_mapping_kernel",
        "input_batch._get_num_sampled_and_rejected_kernel",
        "input_batch._post_update_kernel",
        "input_batch._prepare_pos_seq_lens_kernel",
        "input_batch._prepare_prefill_inputs_kernel",
        "sample.bad_words._bad_words_kernel",
        "sample.gumbel._gumbel_sample_kernel",
        "sample.gumbel._temperature_kernel",
        "sample.logit_bias._bias_kernel",
        "sample.logprob._ranks_kernel",
        "sample.logprob._topk_log_softmax_kernel",
        "sample.penalties._bincount_kernel",
        "sample.penalties._penalties_kernel",
        "sample.prompt_logprob._prompt_logprobs_token_ids_kernel",
        "spec_decode.rejection_sampler._flatten_sampled_kernel",
        "spec_decode.rejection_sampler._gather_draft_sampled_kernel",
        "spec_decode.rejection_sampler_utils._compute_local_logits_stats_kernel",
        "spec_decode.rejection_sampler_utils._insert_resampled_kernel",
        "spec_decode.rejection_sampler_utils._rejection_kernel",
        "spec_decode.rejection_sampler_utils._resample_kernel",
        "structured_outputs._apply_grammar_bitmask_kernel",
    )
} | {"vllm_mtpc.kernels.draft.launches.draft_rows", "vllm_mtpc.proposers.v2.gather._last_rows"}

FALLS_BACK = {"tests.support.odd_kernels.sorts"}


def launched(mode: str, module: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a module of tests.support prints after comparing both interpreters."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "PYTHONPATH": f"{ROOT / 'scripts/interpreter'}:{ROOT}",
        "MTPC_INTERPRETER": mode,
    }
    command = [sys.executable, "-m", f"tests.support.{module}", *arguments]
    child = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    """Few unit-test inputs of every kernel; of each set of constants and dtypes one launch."""
    return launched("check-once", "own_kernels")


def assert_equal(report: Report, expected: set[str]) -> None:
    assert not expected - report.keys(), "kernels that were not launched"
    assert {name for name, entry in report.items() if entry["fell_back"]} == FALLS_BACK & report.keys()
    assert not {name: entry["differs"] for name, entry in report.items() if entry["differs"]}
    assert all(entry["compared"] for name, entry in report.items() if name not in FALLS_BACK)


def test_our_kernels_write_the_same_bits(own: dict[str, Any]) -> None:
    assert len(OURS) == 16, sorted(OURS)
    assert_equal(own["report"], OURS)


def test_served_requests_write_the_same_bits() -> None:
    """vLLM's Model Runner V2 with a btree head; of each set of constants and dtypes one launch."""
    assert_equal(launched("check-once", "workload", "8", "btree")["report"], VLLMS)


def test_injected_fault_is_found(own: dict[str, Any]) -> None:
    for fault, report in own["injected"].items():
        assert any(entry["differs"] for entry in report.values()), fault


@pytest.mark.slow
def test_every_launch_of_ours_writes_the_same_bits() -> None:
    assert_equal(launched("check", "own_kernels", "all")["report"], OURS)


@pytest.mark.slow
def test_every_launch_of_served_requests_writes_the_same_bits() -> None:
    assert_equal(launched("check", "workload", "24", *workload.ENGINES)["report"], VLLMS)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["btree", "block", "o-ptp"])
def test_served_tokens_are_equal_with_all_instances_at_once(engine: str) -> None:
    """MTPC_INTERPRETER=lanes is equal to rounding, which turns no token here."""
    one, other = (launched(mode, "workload", "16", engine)["tokens"] for mode in ("numpy", "lanes"))
    assert one == other
