"""Greedy and max-product decoding against enumeration; values are compared, so that ties cannot matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.circuit_checks import BATCH, TOLERANCE, best_value, check_mpe
from tests.support.enumeration import CIRCUITS, Enumerated, conditionals, make, random_params
from vllm_mtpc.circuits import CircuitParams

torch.set_num_threads(1)

SIZES = [(2, 3, 4), (3, 2, 4), (4, 3, 3), (5, 3, 2), (6, 2, 3), (4, 1, 3)]
ALL = pytest.mark.parametrize("name", CIRCUITS)


@ALL
@pytest.mark.parametrize("n, r, vocab", SIZES)
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


@ALL
@pytest.mark.parametrize("n, r, vocab", SIZES)
def test_mpe_reaches_the_largest_value_over_latents_and_tokens(name, n, r, vocab):
    check_mpe(name, n, r, vocab)


@ALL
@pytest.mark.parametrize("n, r, vocab", [(3, 2, 4), (5, 3, 2), (6, 2, 3)])
def test_mpe_given_a_prefix_reaches_the_largest_value_with_that_prefix(name, n, r, vocab):
    circuit = make(name, n, r)
    params = random_params(circuit, vocab, batch=BATCH, seed=n + 70)
    prefix = torch.stack([torch.arange(BATCH) % vocab, (torch.arange(BATCH) // vocab) % vocab], dim=1)
    tokens = circuit.mpe(params, prefix)
    assert torch.equal(tokens[:, :2], prefix)
    for b, row in enumerate(tokens.tolist()):
        exact = Enumerated(name, params, b)
        expected = best_value(exact, tuple(row[:2]), n)
        assert exact.latent_terms(tuple(row)).max() == pytest.approx(expected, abs=TOLERANCE)


@ALL
@pytest.mark.parametrize("n", [3, 5, 6])
def test_mpe_of_a_truncated_window_leaves_the_tail_out(name, n):
    """The tokens of the tail are marginalised, also where only the very last one is missing."""
    circuit = make(name, n, 2)
    params = random_params(circuit, 3, batch=BATCH, seed=n + 90)
    for m in range(1, n):
        tokens = circuit.mpe(params._replace(leaf=params.leaf[:, :m]))
        assert tokens.shape == (BATCH, m)
        for b, row in enumerate(tokens.tolist()):
            exact = Enumerated(name, params, b)
            assert exact.latent_terms(tuple(row)).max() == pytest.approx(best_value(exact, (), m), abs=TOLERANCE)


@ALL
def test_mpe_with_ties_everywhere_still_reaches_the_largest_value(name):
    circuit = make(name, 5, 2)
    params = random_params(circuit, 3).each(lambda part: torch.zeros_like(part).log_softmax(-1))
    exact = Enumerated(name, params)
    tokens = circuit.mpe(params)[0].tolist()
    assert all(0 <= token < 3 for token in tokens)
    assert exact.latent_terms(tuple(tokens)).max() == pytest.approx(best_value(exact, (), 5), abs=TOLERANCE)


def test_mpe_never_mixes_two_pairs_that_tie():
    """Latents 0 -> 2 and 1 -> 1 are equally good and say (0, 0) and (1, 1); (0, 1) is worse than both."""
    emit = {0: [0.75, 0.25], 1: [0.25, 0.75], 2: [0.75, 0.25]}
    leaf = torch.tensor([[[emit[z] for z in range(3)]] * 2]).log()
    stay = torch.tensor([[0.1, 0.1, 0.8], [0.1, 0.8, 0.1], [0.8, 0.1, 0.1]]).log()
    params = CircuitParams(leaf, torch.tensor([[0.5, 0.5, 1e-6]]).log(), stay[None, None])
    tokens = tuple(make("hmm", 2, 3).mpe(params)[0].tolist())
    exact = Enumerated("hmm", params)
    assert exact.latent_terms((0, 1)).max() < best_value(exact, (), 2) - 0.5
    assert exact.latent_terms(tokens).max() == pytest.approx(best_value(exact, (), 2), abs=TOLERANCE)


def test_mpe_and_greedy_differ_where_latents_compete():
    """One component says 0 and is the likeliest (0.4 * 0.9); two others, 0.3 * 0.9 each, say 1 together."""
    circuit = make("cp", 2, 3)
    first = [[0.9, 0.1], [0.1, 0.9], [0.1, 0.9]]
    leaf = torch.tensor([[first, [[0.6, 0.4]] * 3]]).log()
    params = CircuitParams(leaf, torch.tensor([[0.4, 0.3, 0.3]]).log(), torch.zeros(1, 0, 3, 3))
    assert np.exp(conditionals(Enumerated("cp", params).table(), ())) == pytest.approx([0.42, 0.58])
    assert circuit.mpe(params).tolist() == [[0, 0]]
    assert circuit.greedy(params).tolist() == [[1, 0]]


@ALL
def test_mpe_works_in_inference_mode_and_leaves_no_gradient(name):
    circuit = make(name, 4, 2)
    leaf, root, inner, _ = random_params(circuit, 3, batch=2)
    expected = circuit.mpe(CircuitParams(leaf, root, inner))
    leaf.requires_grad_(True)
    assert torch.equal(circuit.mpe(CircuitParams(leaf, root, inner)), expected)
    assert leaf.grad is None
    with torch.inference_mode():
        assert torch.equal(circuit.mpe(CircuitParams(leaf * 1.0, root * 1.0, inner * 1.0)), expected)
