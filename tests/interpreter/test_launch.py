"""Launches: the interpreter that runs them, fallbacks and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT / 'scripts/interpreter'}:{ROOT}", **env}
    return subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("code", [LAUNCHES, AT_ONCE], ids=["one by one", "all at once"])
def test_kernels_fall_back_and_diverge(code: str) -> None:
    """A kernel that cannot run here falls back; changed device functions are seen; nothing is written twice.

    All instances at once equal instances in turn: where they diverge, writes are undone before each group runs by
    itself.
    """
    child = python(code)
    assert child.returncode == 0, child.stderr[-4000:]


def test_environment_variable_selects_the_interpreter() -> None:
    code = "import triton.runtime.interpreter as i; print(i.InterpretedFunction.run.__module__)"
    for chosen, module in {"": "numpy_interpreter.launch", "triton": "triton.runtime.interpreter"}.items():
        assert python(code, MTPC_INTERPRETER=chosen).stdout.strip() == module
    assert "give numpy, lanes, triton, check or check-once" in python(code, MTPC_INTERPRETER="tritn").stderr
