"""Circuits that must coincide, and sizes that must be refused."""

from __future__ import annotations

import pytest
import torch

from tests.support.enumeration import CIRCUITS, all_tokens, make, random_params, repeated
from vllm_mtpc.circuits import CircuitParams, circuit_class, get_circuit
from vllm_mtpc.errors import HeadConfigError, MtpcError

torch.set_num_threads(1)

# The same numbers added in another order, float32; log probabilities stay above -40.
TOLERANCE = 2e-5


MIXTURES = [name for name in CIRCUITS if circuit_class(name).max_components > 1]


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


@pytest.mark.parametrize("name", CIRCUITS)
@pytest.mark.parametrize("window, num_components", [(1, 1), (0, 1), (-3, 1), (4, 0), (4, -1)])
def test_impossible_sizes_are_refused(name, window, num_components):
    with pytest.raises(HeadConfigError) as caught:
        get_circuit(name, window, num_components)
    wrong = f"window={window}" if window < 2 else f"num_components={num_components}"
    assert wrong in str(caught.value)


def test_a_fully_factorised_circuit_has_one_component():
    with pytest.raises(HeadConfigError, match=r"num_components=8.*exactly 1"):
        get_circuit("ff", 4, 8)


def test_an_unknown_circuit_is_refused_with_the_known_ones():
    with pytest.raises(MtpcError) as caught:
        get_circuit("spn", 4, 8)
    assert "'spn'" in str(caught.value)
    assert all(name in str(caught.value) for name in CIRCUITS)


@pytest.mark.parametrize("name", CIRCUITS)
def test_huge_window_is_refused_at_once(name):
    """A damaged config must not make a process build a tree of 10**12 regions."""
    with pytest.raises(HeadConfigError, match="window=1000000000000"):
        get_circuit(name, 10**12, 1)


@pytest.mark.parametrize("name", CIRCUITS)
def test_circuit_name_equals_its_key(name):
    assert circuit_class(name).name == name
