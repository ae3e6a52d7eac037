"""CONTRIBUTING.md's own circuit: registered as it says there, it is a distribution, drafts, and is known everywhere."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support import circuit_checks, recipe
from tests.support.enumeration import Enumerated, conditionals, make, random_params
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.kernels.draft import naive

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


def test_head_with_recipe_circuit_drafts_from_its_distribution():
    """As a model runner drafts: the verifier's token first; `tests/kernels/test_draft.py` has the kernel's drafts."""
    target = {"model_type": "llama", "vocab_size": 4, "hidden_size": 8}
    config = HeadConfig.create(circuit=NAME, window=5, num_components=3, target=target, verifier="../target")
    torch.manual_seed(0)
    head = build_head(config).requires_grad_(False)
    for weight in head.parameters():
        weight.normal_()
    hidden, first, seen = torch.randn(6, 8), torch.tensor([0, 1, 2, 3, 0, 1]), []

    def draw(log_q: torch.Tensor, k: int) -> torch.Tensor:
        seen.append(log_q)
        return torch.multinomial(log_q.exp(), 1)[:, 0]

    drafts = naive.draft(head.circuit.program, *head.draft_params(hidden, first, 4), pick=draw)
    for b, row in enumerate(torch.cat([first[:, None], drafts], dim=1).tolist()):
        table = Enumerated(NAME, head(hidden), b).table()
        for k in range(4):  # float32 against float64
            wanted = conditionals(table, tuple(row[: k + 1]))
            np.testing.assert_allclose(seen[k][b].numpy(), wanted, rtol=0, atol=circuit_checks.TOLERANCE)


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
