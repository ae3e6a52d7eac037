"""CONTRIBUTING.md's own circuit: registered as it says there, it is a distribution, drafts, and is known everywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.support import circuit_checks, recipe
from tests.support.enumeration import make, random_params

torch.set_num_threads(1)
NAME = recipe.NAME


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with recipe.registered():
        yield


@pytest.mark.parametrize("n, r, vocab", [(2, 3, 4), (3, 2, 4), (5, 3, 3), (6, 2, 3)])
def test_recipe_circuit_equals_enumeration(n, r, vocab):
    circuit = make(NAME, n, r)
    circuit_checks.check_enumeration((NAME, circuit, random_params(circuit, vocab, batch=2, seed=n)))


def test_trained_cp_becomes_the_recipe_circuit():
    circuit_checks.check_growth_from_a_cp("linear", NAME, 4, 1)
    circuit_checks.check_growth_from_an_ff("linear", NAME)


EVERYWHERE = f"""
import vllm_mtpc.circuits as circuits
circuits.CIRCUITS.update({{{recipe.LINE.strip()}}})
from benchmarks import draft, kernels, synthetic
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.plots import draw as plots
from vllm_mtpc.train import options
assert all(part.CIRCUITS is circuits.CIRCUITS for part in (draft, kernels, synthetic))
assert plots.CIRCUIT_LOOKS["{NAME}"] not in [plots.CIRCUIT_LOOKS[name] for name in ("ff", "cp", "hmm", "btree")]
for shown in (HeadConfig, options.TrainOptions):
    assert "{NAME}" in shown.model_fields["circuit"].description
"""


def test_recipe_circuit_is_in_benchmarks_plots_and_help(root):
    """In a separate process, where the line is in the registry from the start."""
    child = subprocess.run([sys.executable, "-c", EVERYWHERE], capture_output=True, text=True, timeout=120, cwd=root)
    assert child.returncode == 0, child.stderr[-2000:]
