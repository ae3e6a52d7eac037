"""The fast interpreter writes what Triton's own writes, bit for bit; launches, fallbacks and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forks
from tests.support.engine import DEMO, Call, Engine, Reply, answers, build
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


# Small ones, and what others do not have: types, paths, constants
FEW = {
    *("alone", "empty rows", "int32 positions", "width 2, int32", "width 1", "next to others"),
    *("one", "a block but one", "a block", "more blocks than one", "wide-btree", "bfloat16", "holes-hmm"),
    *("two tokens", "padded", "padded, blocks", "one block, several launches", "no draws", "float64 noise, blocks"),
    *("bfloat16 cache, blocks", "token, padded", "token, padded, blocks"),
}

CODE = list(b"import os\n\n\ndef walk(path):\n    ")
PROMPTS = [CODE, CODE[:9], list(b"class Reader:\n"), list(b"x = ")]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 4, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "seed": 5},
]
RESTRICTED: list[dict[str, Any]] = [
    {"temperature": 0.0, "bad_words": ["import os"], "prompt_logprobs": 1},
    {"temperature": 1.0, "allowed_token_ids": list(range(97, 123)), "seed": 6},
    {"temperature": 0.7, "min_tokens": 6, "stop_token_ids": [10], "logprobs": 0, "seed": 10},
    {"temperature": 1.0, "structured_outputs": {"json": SCHEMA}, "seed": 7},
]
UNDRAFTED: list[dict[str, Any]] = [
    {"temperature": 1.0, "min_p": 0.1, "seed": 8},
    {"temperature": 1.0, "logit_bias": {65: 3.0, 66: -5.0}, "seed": 9},
    {"temperature": 0.9, "top_p": 0.5, "seed": 11},
    {"temperature": 0.0, "logprobs": 5},
]
BLOCK = {"rejection_sample_method": "block"}
PTP = {"method": "ptp", "num_speculative_tokens": 3}
# engine: a packaged head, its options, what is asked
ENGINES: dict[str, tuple[str | None, dict[str, Any], list[dict[str, Any]]]] = {
    "plain": (None, {}, SAMPLED + RESTRICTED + UNDRAFTED),
    "btree": ("btree", {}, SAMPLED + RESTRICTED),
    "block": ("btree", BLOCK, SAMPLED),
    "hmm": ("hmm", {}, SAMPLED),
    "o-ptp": ("o-ptp", {**PTP, "max_aux_rows": 24, "draft_pass": "merged"}, SAMPLED),
    "c-ptp": ("c-ptp", {**PTP, "draft_pass": "two-pass"}, SAMPLED),
}


def serve(mode: str, max_tokens: int, *names: str) -> tuple[dict[str, Reply], Report]:
    """Replies of engines by name with an interpreter, and what comparing launches found."""
    engines = {}
    for name in names:
        head, spec, asked = ENGINES[name]
        call = Call(PROMPTS * (len(asked) // len(PROMPTS)), [{"max_tokens": max_tokens, **one} for one in asked])
        options = {"backend": "xgrammar", "disable_any_whitespace": True}
        engines[name] = build(DEMO, head, [call], spec=spec, max_model_len=128, structured_outputs_config=options)
    return forks.call("v2", "tests.interpreter.test_equal:_serve", engines, MTPC_INTERPRETER=mode)


def _serve(engines: dict[str, Engine]) -> tuple[dict[str, Any], Report]:
    from numpy_interpreter.check import REPORT

    found = answers(engines)
    assert not any(isinstance(reply, str) for reply in found.values()), found
    return {name: reply for name, (reply,) in found.items()}, REPORT


def python(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'scripts/interpreter'}:{ROOT}", **env}
    return subprocess.run([sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True, timeout=1200)


@pytest.fixture(scope="module")
def own() -> tuple[Report, dict[str, Report]]:
    """Few unit-test inputs of every kernel; of each set of constants and dtypes one launch."""
    return forks.call("v2", "tests.support.own_kernels:compare", FEW, MTPC_INTERPRETER="check-once")


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
    report, _ = forks.call("v2", "tests.support.own_kernels:compare", None, MTPC_INTERPRETER="check")
    assert_equal(report, OURS)


@pytest.mark.parametrize(
    "asked",
    [("check-once", 8, "btree"), pytest.param(("check", 24, *ENGINES), marks=pytest.mark.slow)],
    ids=["once", "every launch"],
)
def test_served_requests_write_the_same_bits(asked: tuple[Any, ...]) -> None:
    """vLLM's Model Runner V2; "once": with a btree head, of each set of constants and dtypes one launch."""
    assert_equal(serve(*asked)[1], SERVED)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["btree", "block", "o-ptp"])
def test_served_tokens_are_equal_with_all_instances_at_once(engine: str) -> None:
    """MTPC_INTERPRETER=lanes is equal to rounding, which turns no token here."""
    one, other = (serve(mode, 16, engine)[0][engine] for mode in ("numpy", "lanes"))
    assert one.tokens == other.tokens


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
