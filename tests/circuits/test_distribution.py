"""Every circuit against enumeration, with bigrams too; tiny probabilities; properties of every size, by hypothesis."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp

from tests.support.circuit_checks import Case, check_enumeration, close
from tests.support.enumeration import (
    CIRCUITS,
    TREES,
    Enumerated,
    all_tokens,
    make,
    prefix_marginals,
    random_params,
    repeated,
    written,
)
from vllm_mtpc.circuits import CircuitParams, circuit_class
from vllm_mtpc.circuits.conditionals import conditionals
from vllm_mtpc.kernels.bigram import Bigram

torch.set_num_threads(1)

RANK = 2
# n, r, V
SIZES = [(2, 3, 4), (3, 2, 4), (3, 1, 3), (4, 3, 3), (5, 3, 3), (5, 2, 2), (6, 3, 2), (6, 2, 3)]
MIXTURES = [name for name in CIRCUITS if circuit_class(name).max_components > 1]
PLAIN = [(name, *size, 0) for name in CIRCUITS for size in SIZES if size[1] > 1 or name in MIXTURES]
TOKENS = [(name, *size, RANK) for name in CIRCUITS for size in [(3, 2, 4), (4, 1, 3), (5, 3, 3)]]


def case_of(name: str, n: int, r: int, vocab: int, token_rank: int) -> Case:
    circuit = make(name, n, r)
    return name, circuit, random_params(circuit, vocab, batch=2, seed=n * 100 + r * 10 + vocab, token_rank=token_rank)


def cases(sizes: list) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", sizes, ids=lambda size: "{}-n{}-r{}-V{}-R{}".format(*size))


@pytest.mark.parametrize("n", TREES)
@pytest.mark.parametrize("name", ["ff", "cp", "hmm", "btree"])
def test_latents_are_those_of_the_definition_in_the_order_of_the_checkpoint(name: str, n: int) -> None:
    circuit, wanted = make(name, n, 2), written(name, n)
    assert (list(circuit.latents.parents), list(circuit.latents.reads)) == wanted
    assert circuit.num_inner == len(wanted.parents)


@cases(PLAIN + TOKENS)
def test_circuit_equals_enumeration(case: tuple) -> None:
    check_enumeration(case_of(*case))


@cases(PLAIN + TOKENS)
def test_marginals_of_the_tail_equal_enumeration(case: tuple) -> None:
    """Without its last leaves, as where fewer drafts are served, or with -1 in their place."""
    name, circuit, params = case_of(*case)
    table, vocab = Enumerated(name, params, 0).table(), params.leaf.shape[-1]
    for m in range(1, circuit.window + 1):
        tokens = all_tokens(m, vocab)
        tail = torch.cat([tokens, torch.full((len(tokens), circuit.window - m), -1)], dim=1)
        expected = prefix_marginals(table, m).ravel()
        for asked, leaves in ((tokens, m), (tail, circuit.window)):
            many = repeated(params._replace(leaf=params.leaf[:, :leaves]), 0, len(tokens))
            close(circuit.log_prob(many, asked), expected)
            close(circuit.conditional_log_probs(many, asked).sum(dim=1), expected)


@cases(PLAIN)
def test_marginals_of_any_positions_equal_enumeration(case: tuple) -> None:
    name, circuit, params = case_of(*case)
    tokens = all_tokens(circuit.window, params.leaf.shape[-1] + 1) - 1  # -1 is among the values of every position
    many = repeated(params, 0, len(tokens))
    expected = prefix_marginals(Enumerated(name, params, 0).table(), circuit.window, skip=True).ravel()
    close(circuit.log_prob(many, tokens), expected)
    terms = circuit.conditional_log_probs(many, tokens)
    close(terms.sum(dim=1), expected)
    trained = conditionals(circuit, many, tokens).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    close(trained.masked_fill(tokens < 0, 0.0).sum(dim=1), expected)
    close(terms[tokens < 0], np.zeros(int((tokens < 0).sum())))


@cases(TOKENS)
def test_fault_of_a_missing_or_shifted_bigram_is_found(case: tuple) -> None:
    """The injected faults: the token before adds to no leaf, or what it adds at another position."""
    name, circuit, params = case_of(*case)
    tokens, table = all_tokens(circuit.window, params.leaf.shape[-1]), Enumerated(name, params, 0).table()
    for bigram in (None, params.bigram._replace(target=params.bigram.target.roll(1, 0))):
        found = circuit.log_prob(repeated(params._replace(bigram=bigram), 0, len(tokens)), tokens)
        assert (found - torch.from_numpy(table.ravel())).abs().max() > 0.1


@cases(TOKENS)
def test_token_after_a_gap_is_refused_with_a_bigram(case: tuple) -> None:
    _, circuit, params = case_of(*case)
    hole = torch.tensor([[-1, 1] + [-1] * (circuit.window - 2)])
    for ask in (circuit.log_prob, circuit.conditional_log_probs, lambda *given: conditionals(circuit, *given)):
        with pytest.raises(ValueError, match="token_rank=0"):
            ask(repeated(params, 0, 1), hole)


def test_gradients_reach_both_factors() -> None:
    """In float64, against central differences."""
    circuit = make("btree", 4, 2)
    params = random_params(circuit, 3, batch=2, seed=5, token_rank=RANK).each(torch.Tensor.double)
    tokens = torch.tensor([[0, 2, 1, 1], [2, 0, -1, -1]])
    factors = [part.double().requires_grad_(True) for part in params.bigram]

    def total(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        log_q = conditionals(circuit, params._replace(bigram=Bigram(source, target)), tokens)
        return (log_q.exp() * torch.arange(3)).sum((1, 2))

    assert torch.autograd.gradcheck(total, factors)


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
