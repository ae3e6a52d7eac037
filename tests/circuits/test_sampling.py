"""Draws against the enumerated distribution by chi-square, with an injected bias; greedy decoding by its values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from tests.support.circuit_checks import TOLERANCE
from tests.support.enumeration import CIRCUITS, Enumerated, conditionals, make, random_params, repeated
from vllm_mtpc.circuits import circuit_class
from vllm_mtpc.circuits.base import Circuit, CircuitParams

torch.set_num_threads(1)
DRAWS, BATCH = 20_000, 8
# Seeds are fixed, so a result never changes by chance. A right sampler gives p below this once in 10 000 seeds; the
# injected bias below must stay far under it.
SIGNIFICANCE, CAUGHT = 1e-4, 1e-12


def p_value(counts: np.ndarray, distribution: np.ndarray) -> float:
    """Chi-square of counts against a distribution; cells that expect fewer than 5 draws are pooled into one."""
    counts, expected = counts.ravel(), distribution.ravel() / distribution.sum() * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return float(chisquare(counts, expected).pvalue)


def draw(circuit: Circuit, params: CircuitParams, prefix: tuple[int, ...] = ()) -> np.ndarray:
    """Counts of each sequence among DRAWS samples, [V] * m."""
    given, vocab = torch.tensor(prefix, dtype=torch.long).repeat(DRAWS, 1), params.leaf.shape[-1]
    tokens = circuit.sample(repeated(params, 0, DRAWS), given if prefix else None, torch.Generator().manual_seed(0))
    assert torch.equal(tokens[:, : len(prefix)], given)
    shape = (vocab,) * tokens.shape[1]
    index = np.ravel_multi_index(tuple(tokens.T.numpy()), shape)
    return np.bincount(index, minlength=np.prod(shape)).reshape(shape)


# n, r, V; the tokens drawn; the tokens before them
ASKED = [((3, 2, 4), 3, ()), ((5, 3, 3), 5, ()), ((5, 3, 3), 3, ()), ((5, 3, 3), 5, (2,)), ((5, 3, 3), 5, (0, 1, 2))]


@pytest.mark.parametrize("size, drawn, prefix", ASKED)
@pytest.mark.parametrize("name", CIRCUITS)
def test_samples_follow_the_enumerated_distribution(name, size, drawn, prefix):
    """Of the whole window, of its first tokens, and given a prefix; injected: seen tokens do not reach the weights."""
    n, r, vocab = size
    circuit, params = make(name, n, r), random_params(make(name, n, r), vocab, seed=n)
    distribution = np.exp(Enumerated(name, params).table()).sum(axis=tuple(range(drawn, n)))
    params = params._replace(leaf=params.leaf[:, :drawn])
    assert p_value(draw(circuit, params, prefix)[prefix], distribution[prefix]) > SIGNIFICANCE
    if drawn == n and circuit_class(name).max_components > 1:
        observe = circuit.observe
        circuit.observe = lambda params, state, k, token: observe(params, state, k, torch.full_like(token, -1))
        assert p_value(draw(circuit, params, prefix)[prefix], distribution[prefix]) < CAUGHT


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
