"""Long windows and tiny probabilities; properties that hold for every size, drawn by hypothesis."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from tests.support.enumeration import CIRCUITS, Enumerated, all_tokens, make, prefix_marginals, random_params, repeated
from vllm_mtpc.circuits import CircuitParams

torch.set_num_threads(1)
ALL = pytest.mark.parametrize("name", CIRCUITS)


@ALL
def test_sixteen_unlikely_tokens_do_not_underflow(name):
    """Far below the smallest float32 (1e-45) and the smallest float64: only log space gets there."""
    circuit = make(name, 16, 2)
    params = random_params(circuit, 4, seed=2, scale=40.0)
    tokens = params.leaf[0].max(dim=1).values.argmin(dim=-1)  # [n], unlikely under every component
    exact = Enumerated(name, params)
    terms = circuit.conditional_log_probs(params, tokens[None])[0]
    # float32 keeps 1.2e-7 of values near 1000, over about 50 rounded additions
    for m in (1, 7, 15, 16):
        expected = logsumexp(exact.latent_terms(tuple(tokens[:m].tolist())))
        assert terms[:m].sum().item() == pytest.approx(expected, rel=5e-6, abs=1e-4 if m < 16 else 0)
    assert expected < -750
    assert circuit.log_prob(params, tokens[None]).item() == pytest.approx(expected, rel=5e-6)


@ALL
def test_a_latent_that_was_all_but_ruled_out_can_come_back(name):
    """Its weight of exp(-120) or less is no float32, and decides the next conditional all the same."""
    circuit, vocab = make(name, 4, 2), 2
    r = circuit.num_components
    leaf = torch.tensor([[0.0, -120.0], [-120.0, 0.0]])[:r].expand(1, 4, r, vocab)  # latent z says token z
    stay = torch.tensor([[0.0, -200.0], [-200.0, 0.0]])[:r, :r].expand(1, circuit.num_inner, r, r)
    params = CircuitParams(leaf, torch.zeros(1, r).log_softmax(dim=-1), stay)
    table, tokens = Enumerated(name, params).table(), all_tokens(4, vocab)
    got = circuit.conditional_log_probs(repeated(params, 0, len(tokens)), tokens).cumsum(dim=1)
    for m in range(1, 5):
        expected = prefix_marginals(table, m)[tuple(tokens[:, :m].T.numpy())]
        np.testing.assert_allclose(got[:, m - 1].numpy(), expected, rtol=1e-6, atol=1e-4)  # float32 of up to 480


TOLERANCE = 5e-5  # float32, log probabilities down to about -100
quick = settings(deadline=None, derandomize=True, max_examples=40, database=None)


@st.composite
def instances(draw):
    """(circuit, params, tokens[B, n] in -1 .. V - 1)."""
    name = draw(st.sampled_from(CIRCUITS))
    circuit = make(name, draw(st.integers(2, 9)), draw(st.integers(1, 4)))
    vocab, batch, seed = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(0, 2**31))
    params = random_params(circuit, vocab, batch, seed, scale=draw(st.sampled_from([0.1, 1.0, 5.0])))
    generator = torch.Generator().manual_seed(seed)
    return circuit, params, torch.randint(-1, vocab, (batch, circuit.window), generator=generator)


@quick
@given(instances())
def test_conditionals_sum_to_one_and_add_up_to_the_joint(instance):
    circuit, params, tokens = instance
    sums, state = circuit.conditional_log_probs(params, tokens).cumsum(dim=1), circuit.start(params)
    for k in range(circuit.window):
        torch.testing.assert_close(sums[:, k], circuit.log_prob(params, tokens[:, : k + 1]), rtol=0, atol=TOLERANCE)
        total = circuit.next_log_probs(params, state, k).logsumexp(dim=-1)
        torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=TOLERANCE)
        state = circuit.observe(params, state, k, tokens[:, k])
