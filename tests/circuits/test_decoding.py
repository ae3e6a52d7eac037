"""Greedy decoding against enumeration; values are compared, so that ties cannot matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.circuit_checks import BATCH, TOLERANCE
from tests.support.enumeration import CIRCUITS, Enumerated, conditionals, make, random_params
from vllm_mtpc.circuits import CircuitParams

torch.set_num_threads(1)


@pytest.mark.parametrize("name", CIRCUITS)
@pytest.mark.parametrize("n, r, vocab", [(2, 3, 4), (3, 2, 4), (4, 3, 3), (5, 3, 2), (6, 2, 3), (4, 1, 3)])
def test_greedy_takes_the_argmax_of_every_enumerated_conditional(name, n, r, vocab):
    circuit = make(name, n, r)
    params = random_params(circuit, vocab, batch=BATCH, seed=n)
    prefix = torch.arange(BATCH)[:, None] % vocab
    for given in (None, prefix):
        tokens = circuit.greedy(params, given)
        assert given is None or torch.equal(tokens[:, :1], prefix)
        for b, row in enumerate(tokens.tolist()):
            table = Enumerated(name, params, b).table()
            for k in range(0 if given is None else 1, n):
                distribution = conditionals(table, tuple(row[:k]))
                assert distribution[row[k]] >= distribution.max() - TOLERANCE


def test_greedy_sums_over_competing_latents():
    """The most probable component (0.4 * 0.9) prefers token 0; two others, 0.3 * 0.9 each, prefer token 1."""
    circuit = make("cp", 2, 3)
    leaf = torch.tensor([[[[0.9, 0.1], [0.1, 0.9], [0.1, 0.9]], [[0.6, 0.4]] * 3]]).log()
    params = CircuitParams(leaf, torch.tensor([[0.4, 0.3, 0.3]]).log(), torch.zeros(1, 0, 3, 3))
    assert np.exp(conditionals(Enumerated("cp", params).table(), ())) == pytest.approx([0.42, 0.58])
    assert circuit.greedy(params).tolist() == [[1, 0]]
