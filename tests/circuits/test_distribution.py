"""Every circuit against enumeration, with bigrams too; tiny probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
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
from vllm_mtpc.circuits.base import CircuitParams
from vllm_mtpc.circuits.conditionals import conditionals
from vllm_mtpc.kernels.filter import filter_weights

torch.set_num_threads(1)
ALL = pytest.mark.parametrize("name", CIRCUITS)
# n, r, V, rank of a bigram
SIZES = [(2, 3, 4, 0), (3, 2, 4, 0), (4, 3, 3, 0), (5, 3, 3, 0), (6, 3, 2, 0), (6, 2, 3, 0), (7, 2, 2, 0), (9, 2, 2, 0)]
TOKENS = [(3, 2, 4, 2), (4, 1, 3, 2), (5, 3, 3, 2)]


def case_of(name: str, n: int, r: int, vocab: int, token_rank: int) -> Case:
    circuit = make(name, n, r)
    return name, circuit, random_params(circuit, vocab, batch=2, seed=n * 100 + r * 10 + vocab, token_rank=token_rank)


@pytest.mark.parametrize("n", TREES)
@pytest.mark.parametrize("name", ["ff", "cp", "hmm", "btree"])
def test_latents_are_those_of_the_definition_in_the_order_of_the_checkpoint(name: str, n: int) -> None:
    circuit, wanted = make(name, n, 2), written(name, n)
    assert (list(circuit.latents.parents), list(circuit.latents.reads)) == wanted
    assert circuit.num_inner == len(wanted.parents)


@pytest.mark.parametrize("size", SIZES + TOKENS)
@ALL
def test_circuit_equals_enumeration(name: str, size: tuple[int, int, int, int]) -> None:
    check_enumeration(case_of(name, *size))


@pytest.mark.parametrize("size", SIZES + TOKENS)
@ALL
def test_marginals_equal_enumeration(name: str, size: tuple[int, int, int, int]) -> None:
    """Without its last leaves, as for fewer drafts; with -1 in their place; with -1 anywhere if there is no bigram."""
    _, circuit, params = case_of(name, *size)
    table, (n, _, vocab, rank) = Enumerated(name, params, 0).table(), size
    for m in range(1, n + 1):
        tokens = all_tokens(m, vocab)
        tail = torch.cat([tokens, torch.full((len(tokens), n - m), -1)], dim=1)
        expected = prefix_marginals(table, m).ravel()
        for asked, leaves in ((tokens, m), (tail, n)):
            many = repeated(params._replace(leaf=params.leaf[:, :leaves]), 0, len(tokens))
            close(circuit.log_prob(many, asked), expected)
            close(circuit.conditional_log_probs(many, asked).sum(dim=1), expected)
    tokens = all_tokens(n, vocab + 1) - 1
    many = repeated(params, 0, len(tokens))
    if rank:
        for ask in (circuit.log_prob, circuit.conditional_log_probs, lambda *given: conditionals(circuit, *given)):
            with pytest.raises(ValueError, match="token_rank=0"):
                ask(many, tokens)
        return
    expected, terms = prefix_marginals(table, n, skip=True).ravel(), circuit.conditional_log_probs(many, tokens)
    close(circuit.log_prob(many, tokens), expected)
    close(terms.sum(dim=1), expected)
    trained = conditionals(circuit, many, tokens).gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    close(trained.masked_fill(tokens < 0, 0.0).sum(dim=1), expected)
    close(terms[tokens < 0], np.zeros(int((tokens < 0).sum())))


@ALL
def test_sixteen_unlikely_tokens_do_not_underflow(name: str) -> None:
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
def test_a_latent_that_was_all_but_ruled_out_can_come_back(name: str) -> None:
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


@ALL
def test_impossible_latents_give_no_nan_in_gradients(name: str) -> None:
    """-inf in evidence and root has the gradients of exp(-1e6), which is 0 in float64."""
    circuit, generator = make(name, 7, 4), torch.Generator().manual_seed(1)
    params = random_params(circuit, 2, batch=2, seed=1)
    first = torch.arange(circuit.num_components) == 0  # the latent that stays
    evidence, root = (
        part.masked_fill((torch.rand(part.shape, generator=generator) < 0.4) & ~first, -torch.inf)
        for part in (params.leaf[..., 0], params.root)
    )
    upstream, grads = torch.randn(evidence.shape, generator=generator), []
    for dtype, least in ((torch.float32, -torch.inf), (torch.float64, -1e6)):
        inputs = [part.to(dtype).clamp(min=least).requires_grad_() for part in (evidence, root, params.inner)]
        weights = filter_weights(circuit.program, *inputs)
        given = upstream.to(dtype).masked_fill(weights < -1e5, 0.0)  # as from exp or logsumexp
        grads.append(torch.autograd.grad(weights, inputs, given, materialize_grads=True))
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)  # float32 rounding over some 30 steps
