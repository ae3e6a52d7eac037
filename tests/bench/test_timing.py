"""The draft kernel as it is timed drafts what its definition would: interpreted, with either noise."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys, warnings
import torch
from vllm_mtpc.bench.timing import draft_kernel
from vllm_mtpc.circuits import get_circuit
from vllm_mtpc.kernels.draft import naive

warnings.simplefilter("ignore")
if sys.argv[1] == "own":
    sys.modules["vllm.v1.worker.gpu.sample.gumbel"] = None  # importing it raises ImportError
circuit, cpu = get_circuit("hmm", 3, 2), torch.device("cpu")
torch.manual_seed(0)
leaf = torch.randn(4, 2, 2, 5)
params = (torch.randn(4, 2) - 3, leaf, torch.randn(4, 2), torch.randn(4, circuit.num_inner, 2, 2))
greedy = naive.draft(circuit.program, *params, pick=lambda log_q, k: log_q.argmax(-1))
assert torch.equal(draft_kernel(circuit.program, leaf.shape, 0.0, cpu)(params), greedy)
drawn = draft_kernel(circuit.program, leaf.shape, 1.0, cpu)(params)
assert not torch.equal(drawn, greedy) and 0 <= int(drawn.min()) and int(drawn.max()) < 5
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed: no kernel to be timed")
@pytest.mark.parametrize("noise", [pytest.param("vllm", marks=pytest.mark.slow), "own"])
def test_what_is_timed_drafts(noise: str, root: Path) -> None:
    env = dict(os.environ, TRITON_INTERPRET="1", PYTHONPATH=str(root / "scripts" / "interpreter"))
    done = subprocess.run([sys.executable, "-c", SCRIPT, noise], env=env, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
