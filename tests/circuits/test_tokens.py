"""Leaves conditioned on the token before them, against enumeration: every circuit, drawn, scored, refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.circuit_checks import check_conditionals, check_conditionals_along_a_sequence, check_joint, close
from tests.support.enumeration import CIRCUITS, Enumerated, all_tokens, make, prefix_marginals, random_params, repeated
from vllm_mtpc.circuits import Circuit, CircuitParams
from vllm_mtpc.circuits.conditionals import conditionals
from vllm_mtpc.kernels.bigram import Bigram
from vllm_mtpc.kernels.draft import naive

torch.set_num_threads(1)

RANK, DRAWS = 2, 20_000
SIZES = [(3, 2, 4), (4, 1, 3), (5, 3, 3)]  # n, r, V


@pytest.fixture(
    params=[(name, *size) for name in CIRCUITS for size in SIZES], ids=lambda case: "{}-n{}-r{}".format(*case)
)
def case(request) -> tuple[str, Circuit, CircuitParams]:
    name, n, r, vocab = request.param
    circuit = make(name, n, r)
    return name, circuit, random_params(circuit, vocab, batch=2, seed=n * 100 + r, token_rank=RANK)


@pytest.mark.parametrize("check", [check_joint, check_conditionals, check_conditionals_along_a_sequence])
def test_token_conditioned_circuit_equals_enumeration(case, check: Callable) -> None:
    check(case)


def test_fault_of_a_missing_bigram_is_found(case) -> None:
    """The injected fault: the token before adds to no leaf."""
    name, circuit, params = case
    table = Enumerated(name, params, 0).table()
    tokens = all_tokens(circuit.window, params.leaf.shape[-1])
    found = circuit.log_prob(repeated(params._replace(bigram=None), 0, len(tokens)), tokens)
    assert (found - torch.from_numpy(table.ravel())).abs().max() > 0.1


def test_all_conditionals_of_training_equal_enumeration(case) -> None:
    name, circuit, params = case
    table = Enumerated(name, params, 1).table()
    tokens = all_tokens(circuit.window, params.leaf.shape[-1])
    log_q = conditionals(circuit, repeated(params, 1, len(tokens)), tokens)
    for k in range(circuit.window):
        prefixes = prefix_marginals(table, k + 1)
        expected = prefixes - (prefix_marginals(table, k)[..., None] if k else 0)
        close(log_q[:, k], np.broadcast_to(expected[tuple(tokens[:, :k].T.numpy())], (len(tokens), table.shape[0])))


def test_tail_is_marginalised_and_token_after_a_gap_refused(case) -> None:
    name, circuit, params = case
    table, vocab = Enumerated(name, params, 0).table(), params.leaf.shape[-1]
    for m in range(1, circuit.window + 1):
        tokens = all_tokens(m, vocab)
        tail = torch.cat([tokens, torch.full((len(tokens), circuit.window - m), -1)], dim=1)
        expected = prefix_marginals(table, m).ravel()
        for given, leaves in ((tokens, m), (tail, circuit.window)):
            many = repeated(params._replace(leaf=params.leaf[:, :leaves]), 0, len(tokens))
            close(circuit.log_prob(many, given), expected)
            close(circuit.conditional_log_probs(many, given).sum(dim=1), expected)
    hole = torch.tensor([[-1, 1] + [-1] * (circuit.window - 2)])
    for ask in (circuit.log_prob, circuit.conditional_log_probs, lambda *given: conditionals(circuit, *given)):
        with pytest.raises(ValueError, match="token_rank=0"):
            ask(repeated(params, 0, 1), hole)


def drawn(name: str, params: CircuitParams, bigram: Bigram, first: int) -> np.ndarray:
    """Counts of the drafts that `kernels.draft.naive` draws after one token, [V] * (n - 1)."""
    circuit, (_, n, r, vocab) = make(name, params.leaf.shape[1], params.leaf.shape[2]), params.leaf.shape
    many, generator = repeated(params, 0, DRAWS), torch.Generator().manual_seed(3)
    tokens = naive.draft(
        circuit.program,
        many.leaf[:, 0, :, first],
        many.leaf[:, 1:] + torch.rand(DRAWS, n - 1, r, 1, generator=generator),  # logits: any constant next to them
        many.root,
        many.inner,
        torch.full((DRAWS,), first),
        bigram,
        pick=lambda log_q, k: torch.multinomial(log_q.exp(), 1, generator=generator)[:, 0],
    )
    return np.bincount(np.ravel_multi_index(tuple(tokens.T.numpy()), (vocab,) * (n - 1)), minlength=vocab ** (n - 1))


@pytest.mark.parametrize("name", CIRCUITS)
def test_drafts_follow_enumeration_and_shifted_bigram_is_found(name: str) -> None:
    params = random_params(make(name, 4, 3), 3, seed=8, token_rank=RANK)
    table = np.exp(Enumerated(name, params).table())
    first = 1
    distribution = (table[first] / table[first].sum()).ravel()

    def distance(bigram: Bigram) -> float:
        return abs(drawn(name, params, bigram, first) / DRAWS - distribution).sum() / 2

    # 27 cells: the mean total variation of exact draws is at most sqrt(27 / (2 pi DRAWS)) = 0.015, and 0.003 its spread
    assert distance(params.bigram) < 0.025
    shifted = params.bigram._replace(target=params.bigram.target.roll(1, 0))  # of another position
    assert distance(shifted) > 0.05


def test_gradients_reach_both_factors() -> None:
    """In float64, against central differences."""
    circuit = make("btree", 4, 2)
    params = random_params(circuit, 3, batch=2, seed=5, token_rank=RANK)
    params = params.each(torch.Tensor.double)
    tokens = torch.tensor([[0, 2, 1, 1], [2, 0, -1, -1]])
    factors = [part.double().requires_grad_(True) for part in params.bigram]

    def total(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        log_q = conditionals(circuit, params._replace(bigram=Bigram(source, target)), tokens)
        return (log_q.exp() * torch.arange(3)).sum((1, 2))

    assert torch.autograd.gradcheck(total, factors)
