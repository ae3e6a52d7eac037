"""Properties that hold for every size, on sizes drawn by hypothesis (the same ones in every run)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.enumeration import CIRCUITS, make, random_params

torch.set_num_threads(1)
TOLERANCE = 5e-5  # float32, log probabilities down to about -100
quick = settings(deadline=None, derandomize=True, max_examples=40, database=None)


@st.composite
def instances(draw, max_window: int = 9):
    """(circuit, params, tokens[B, n] in -1 .. V - 1)."""
    name = draw(st.sampled_from(CIRCUITS))
    circuit = make(name, draw(st.integers(2, max_window)), draw(st.integers(1, 4)))
    vocab, batch, seed = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(0, 2**31))
    params = random_params(circuit, vocab, batch, seed, scale=draw(st.sampled_from([0.1, 1.0, 5.0])))
    generator = torch.Generator().manual_seed(seed)
    return circuit, params, torch.randint(-1, vocab, (batch, circuit.window), generator=generator)


@quick
@given(instances())
def test_conditionals_add_up_to_the_joint_for_every_prefix(instance):
    circuit, params, tokens = instance
    sums = circuit.conditional_log_probs(params, tokens).cumsum(dim=1)
    for m in range(1, circuit.window + 1):
        torch.testing.assert_close(sums[:, m - 1], circuit.log_prob(params, tokens[:, :m]), rtol=0, atol=TOLERANCE)


@quick
@given(instances())
def test_every_conditional_sums_to_one(instance):
    circuit, params, tokens = instance
    state = circuit.start(params)
    for k in range(circuit.window):
        total = circuit.next_log_probs(params, state, k).logsumexp(dim=-1)
        torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=TOLERANCE)
        state = circuit.observe(params, state, k, tokens[:, k])


@quick
@given(instances(), st.integers(0, 9))
def test_decoding_keeps_the_prefix_and_stays_in_the_vocabulary(instance, seen):
    circuit, params, tokens = instance
    prefix = tokens.clamp(min=0)[:, : min(seen, circuit.window)]
    for decode in (circuit.sample, circuit.greedy):
        drawn = decode(params, prefix)
        assert drawn.shape == tokens.shape
        assert torch.equal(drawn[:, : prefix.shape[1]], prefix)
        assert int(drawn.min()) >= 0
        assert int(drawn.max()) < params.leaf.shape[-1]
