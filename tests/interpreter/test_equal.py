"""The fast interpreter writes what Triton's own writes, bit for bit; launches, fallbacks and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import workload
from tests.support.interpreted import launched_kernels

ROOT = Path(__file__).parents[2]
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
SERVED |= {"vllm_mtpc.kernels.draft.launches.draft_rows", "vllm_mtpc.proposers.v2.gather.gather_last_rows"}
FALLS_BACK = {"tests.support.odd_kernels.sorts"}


def python(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'scripts/interpreter'}:{ROOT}", **env}
    return subprocess.run([sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True, timeout=1200)


def launched(mode: str, module: str, *arguments: str) -> dict[str, Any]:
    """The JSON that a module of tests.support prints after comparing both interpreters."""
    options = {"VLLM_USE_V2_MODEL_RUNNER": "1", "MTPC_INTERPRETER": mode}
    child = python("-m", f"tests.support.{module}", *arguments, **options)
    assert child.returncode == 0, child.stdout[-2000:] + child.stderr[-4000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    """Few unit-test inputs of every kernel; of each set of constants and dtypes one launch."""
    return launched("check-once", "own_kernels")


def assert_equal(report: Report, expected: set[str]) -> None:
    """`expected`: names of kernels, with or without their modules."""
    names = report.keys() | {name.rpartition(".")[2] for name in report}
    assert not expected - names, "kernels that were not launched"
    assert {name for name, entry in report.items() if entry["fell_back"]} == FALLS_BACK & report.keys()
    assert not {name: entry["differs"] for name, entry in report.items() if entry["differs"]}
    assert all(entry["compared"] for name, entry in report.items() if name not in FALLS_BACK)


def test_our_kernels_write_the_same_bits(own: dict[str, Any]) -> None:
    assert len(OURS) == 16, sorted(OURS)
    assert_equal(own["report"], OURS)


def test_injected_fault_is_found(own: dict[str, Any]) -> None:
    for fault, report in own["injected"].items():
        assert any(entry["differs"] for entry in report.values()), fault


@pytest.mark.slow
def test_every_launch_of_ours_writes_the_same_bits() -> None:
    assert_equal(launched("check", "own_kernels", "all")["report"], OURS)


ENGINES = [("check-once", "8", "btree"), pytest.param(("check", "24", *workload.ENGINES), marks=pytest.mark.slow)]


@pytest.mark.parametrize("asked", ENGINES, ids=["once", "every launch"])
def test_served_requests_write_the_same_bits(asked: tuple[str, ...]) -> None:
    """vLLM's Model Runner V2; "once": with a btree head, of each set of constants and dtypes one launch."""
    mode, *arguments = asked
    assert_equal(launched(mode, "workload", *arguments)["report"], SERVED)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["btree", "block", "o-ptp"])
def test_served_tokens_are_equal_with_all_instances_at_once(engine: str) -> None:
    """MTPC_INTERPRETER=lanes is equal to rounding, which turns no token here."""
    one, other = (launched(mode, "workload", "16", engine)["tokens"] for mode in ("numpy", "lanes"))
    assert one == other


LAUNCHES = """
import torch, triton.runtime.interpreter as triton_interpreter
from tests.support import odd_kernels as odd
from numpy_interpreter import launch

x, out = torch.randn(64, generator=torch.Generator().manual_seed(0)), torch.zeros(64)
odd.sorts[(1,)](x, out, SIZE=64)
assert torch.equal(out, x.sort().values)
assert [kernel.__name__ for kernel in launch.fallen_back] == ["sorts"], launch.fallen_back

odd.scales[(1,)](x, out, SIZE=64)
assert torch.equal(out, 2 * x)
odd.doubled, kept = odd.negated, odd.doubled  # as a test that injects a fault does
odd.scales[(1,)](x, out, SIZE=64)
assert torch.equal(out, -x)
odd.doubled = kept

out.zero_()
try:
    odd.writes_then_sorts[(1,)](x, out, True, SIZE=64)
except triton_interpreter.InterpreterError as error:
    assert "tensor.sort" in str(error), error
else:
    raise AssertionError("ran twice")
assert out[0] == x[0]
odd.writes_then_sorts[(1,)](x, out, False, SIZE=64)
assert torch.equal(out, x)
assert len(launch.fallen_back) == 1
"""

AT_ONCE = """
import torch
from tests.support import odd_kernels as odd
from numpy_interpreter import launch

x, outs = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)), []
for launch.is_at_once in (False, True):
    outs.append(torch.zeros(48))
    odd.parts[(48,)](x, outs[-1], SIZE=32)
assert torch.allclose(*outs, rtol=1e-6) and not launch.one_by_one and outs[0].unique().numel() > 40, outs
"""


@pytest.mark.parametrize("code", [LAUNCHES, AT_ONCE], ids=["one by one", "all at once"])
def test_kernels_fall_back_and_diverge(code: str) -> None:
    """A kernel that cannot run here falls back; changed device functions are seen; nothing is written twice.

    All instances at once equal instances in turn: where they diverge, writes are undone before each group runs by
    itself.
    """
    child = python("-c", code)
    assert child.returncode == 0, child.stderr[-4000:]


def test_environment_variable_selects_the_interpreter() -> None:
    code = "import triton.runtime.interpreter as i; print(i.InterpretedFunction.run.__module__)"
    for chosen, module in {"": "numpy_interpreter.launch", "triton": "triton.runtime.interpreter"}.items():
        assert python("-c", code, MTPC_INTERPRETER=chosen).stdout.strip() == module
    assert "give numpy, lanes, triton, check or check-once" in python("-c", code, MTPC_INTERPRETER="tritn").stderr
