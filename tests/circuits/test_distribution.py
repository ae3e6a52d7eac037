"""Joint, marginals and conditionals of every circuit against brute-force enumeration; circuits that coincide."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.circuit_checks import (
    TOLERANCE,
    check_conditionals,
    check_conditionals_along_a_sequence,
    check_joint,
    close,
)
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
from vllm_mtpc.circuits import Circuit, CircuitParams, circuit_class, get_circuit

torch.set_num_threads(1)

SIZES = [(2, 3, 4), (3, 2, 4), (3, 1, 3), (4, 3, 3), (5, 3, 3), (5, 2, 2), (6, 3, 2), (6, 2, 3)]  # n, r, V
CASES = [(name, *size) for name in CIRCUITS for size in SIZES if size[1] > 1 or circuit_class(name).max_components > 1]

MIXTURES = [name for name in CIRCUITS if circuit_class(name).max_components > 1]


@pytest.fixture(params=CASES, ids=lambda case: "{}-n{}-r{}-V{}".format(*case))
def case(request) -> tuple[str, Circuit, CircuitParams]:
    name, n, r, vocab = request.param
    circuit = make(name, n, r)
    return name, circuit, random_params(circuit, vocab, batch=2, seed=n * 100 + r * 10 + vocab)


@pytest.mark.parametrize("n", TREES)
@pytest.mark.parametrize("name", ["ff", "cp", "hmm", "btree"])
def test_latents_are_those_of_the_definition_in_the_order_of_the_checkpoint(name, n):
    circuit, wanted = make(name, n, 2), written(name, n)
    assert (list(circuit.latents.parents), list(circuit.latents.reads)) == wanted
    assert circuit.num_inner == len(wanted.parents)


@pytest.mark.parametrize("check", [check_joint, check_conditionals, check_conditionals_along_a_sequence])
def test_circuit_equals_enumeration(case, check):
    check(case)


def test_marginals_of_the_tail_and_of_any_positions_equal_enumeration(case):
    name, circuit, params = case
    table = Enumerated(name, params, 0).table()
    vocab = params.leaf.shape[-1]
    for m in range(1, circuit.window + 1):
        tokens = all_tokens(m, vocab + 1) - 1  # -1 is among the values of every position
        many = repeated(params, 0, len(tokens))
        expected = prefix_marginals(table, m, skip=True).ravel()
        close(circuit.log_prob(many, tokens), expected)
        terms = circuit.conditional_log_probs(many, tokens)
        close(terms.sum(dim=1), expected)
        close(terms[tokens < 0], np.zeros(int((tokens < 0).sum())))


def test_a_window_without_its_last_leaves_has_the_same_conditionals(case):
    """Serving K < n - 1 drafts computes only the first leaves: the tail is marginalised."""
    name, circuit, params = case
    table = Enumerated(name, params, 0).table()
    for m in range(1, circuit.window):
        tokens = all_tokens(m, params.leaf.shape[-1])
        short = repeated(params._replace(leaf=params.leaf[:, :m]), 0, len(tokens))
        expected = prefix_marginals(table, m).ravel()
        close(circuit.conditional_log_probs(short, tokens).sum(dim=1), expected)
        close(circuit.log_prob(short, tokens), expected)


def test_circuits_of_a_batch_are_independent(case):
    _, circuit, params = case
    tokens = all_tokens(circuit.window, params.leaf.shape[-1])[[1, -2]]
    both = circuit.conditional_log_probs(params, tokens)
    for b in range(2):
        alone = circuit.conditional_log_probs(repeated(params, b, 1), tokens[b : b + 1])
        close(alone, both[b : b + 1].numpy())


def assert_same_distribution(
    first: tuple[str, CircuitParams], second: tuple[str, CircuitParams], n: int, r: int
) -> None:
    tokens = all_tokens(n, first[1].leaf.shape[-1])
    joints, conditionals = [], []
    for name, params in (first, second):
        many, circuit = repeated(params, 0, len(tokens)), get_circuit(name, n, r)
        joints.append(circuit.log_prob(many, tokens))
        conditionals.append(circuit.conditional_log_probs(many, tokens))
    torch.testing.assert_close(*joints, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(*conditionals, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", [name for name in MIXTURES if make(name, 3, 2).num_inner])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_constant_latents_equal_a_cp(name, n):
    circuit = make(name, n, 3)
    cp = random_params(make("cp", n, 3), 3, seed=n)
    identity = torch.eye(3).log().expand(1, circuit.num_inner, 3, 3)  # zero off the diagonal: -inf
    assert_same_distribution((name, cp._replace(inner=identity)), ("cp", cp), n, 3)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("n", [2, 5])
def test_one_component_equals_a_fully_factorised_circuit(name, n):
    params = random_params(make(name, n, 1), 3, seed=n)
    assert_same_distribution((name, params), ("ff", params), n, 1)
