"""Draws against the enumerated distribution by chi-square, with injected biases; greedy decoding by its values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from tests.support.circuit_checks import TOLERANCE
from tests.support.enumeration import CIRCUITS, Enumerated, conditionals, make, random_params, repeated
from vllm_mtpc.circuits import Circuit, CircuitParams, circuit_class

torch.set_num_threads(1)

DRAWS, BATCH = 20_000, 8
# Seeds are fixed, so a result never changes by chance. A right sampler gives p below this once in 10 000 seeds; the
# injected biases below must stay far under it.
SIGNIFICANCE, CAUGHT = 1e-4, 1e-12

MIXTURES = [name for name in CIRCUITS if circuit_class(name).max_components > 1]


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
    given = torch.tensor(prefix, dtype=torch.long).repeat(DRAWS, 1)
    tokens = circuit.sample(repeated(params, 0, DRAWS), given if prefix else None, torch.Generator().manual_seed(0))
    assert torch.equal(tokens[:, : len(prefix)], given)
    return counts_of(tokens, params.leaf.shape[-1])


def counts_of(tokens: torch.Tensor, vocab: int) -> np.ndarray:
    shape = (vocab,) * tokens.shape[1]
    index = np.ravel_multi_index(tuple(tokens.T.numpy()), shape)
    return np.bincount(index, minlength=vocab ** tokens.shape[1]).reshape(shape)


def forgetful(circuit: Circuit) -> Circuit:
    """The injected bias: observed tokens never reach the weights."""
    observe = circuit.observe
    circuit.observe = lambda params, state, k, token: observe(params, state, k, torch.full_like(token, -1))
    return circuit


# n, r, V; the tokens drawn; the tokens before them
ASKED = [((3, 2, 4), 3, ()), ((5, 3, 3), 5, ()), ((5, 3, 3), 3, ()), ((5, 3, 3), 5, (2,)), ((5, 3, 3), 5, (0, 1, 2))]


@pytest.mark.parametrize("size, drawn, prefix", ASKED)
@pytest.mark.parametrize("name", CIRCUITS)
def test_samples_follow_the_enumerated_distribution(name, size, drawn, prefix):
    """Of the whole window, of its first tokens, and given a prefix."""
    n, r, vocab = size
    params = random_params(make(name, n, r), vocab, seed=n)
    distribution = np.exp(Enumerated(name, params).table()).sum(axis=tuple(range(drawn, n)))
    counts = draw(make(name, n, r), params._replace(leaf=params.leaf[:, :drawn]), prefix)
    assert p_value(counts[prefix], distribution[prefix]) > SIGNIFICANCE


@pytest.mark.parametrize("name", MIXTURES)
def test_fault_of_ignored_draws_is_found(name):
    circuit = make(name, 3, 2)
    params = random_params(circuit, 4, seed=3)  # as in test_samples_follow_the_enumerated_distribution
    distribution = np.exp(Enumerated(name, params).table())
    assert p_value(draw(forgetful(circuit), params), distribution) < CAUGHT


@pytest.mark.parametrize("name", MIXTURES)
def test_fault_of_an_ignored_prefix_is_found(name):
    """What drafting without the verifier's token would do: everything after the prefix is drawn rightly."""
    circuit = make(name, 5, 3)
    leaf, root, inner, _ = random_params(circuit, 3, seed=11, scale=3.0)
    stay = (inner + 3 * torch.eye(3)).log_softmax(dim=-1)  # latents that last: tokens depend on the first one
    params = CircuitParams(leaf, torch.zeros_like(root).log_softmax(dim=-1), stay)
    distribution = np.exp(Enumerated(name, params).table())
    unseen = torch.full((DRAWS, 1), -1)
    tokens = circuit.sample(repeated(params, 0, DRAWS), unseen, torch.Generator().manual_seed(1))
    counts = counts_of(tokens[:, 1:], 3)
    assert p_value(counts, distribution.sum(axis=0)) > SIGNIFICANCE  # right without the prefix
    assert min(p_value(counts, distribution[token]) for token in range(3)) < CAUGHT


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
