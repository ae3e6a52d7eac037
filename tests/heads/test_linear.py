"""LinearHead: shapes, initialisation close to CP, truncation and precision."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support import heads_zoo
from tests.support.enumeration import CIRCUITS, INNER_REGIONS, all_tokens, repeated
from tests.support.heads_zoo import B, D, V, hidden_states
from vllm_mtpc.circuits import CircuitParams
from vllm_mtpc.heads.base import INIT_STD, STAY_PROBABILITY
from vllm_mtpc.heads.linear import LinearHead

torch.set_num_threads(1)
ALL = pytest.mark.parametrize("name", CIRCUITS)


def build(name: str, n: int = 5, r: int = 3, vocab: int = V) -> LinearHead:
    return heads_zoo.build("linear", name, r, n, vocab)


@ALL
@pytest.mark.parametrize("n, r", [(2, 1), (5, 3), (8, 4)])
def test_parameters_and_outputs_have_the_shapes_of_the_circuit(name, n, r):
    head = build(name, n, r)
    r = 1 if name == "ff" else r
    inner = head.circuit.num_inner
    expected = {"leaf_weight": (n, r, V, D)}
    if name != "ff":
        expected["root_weight"] = (r, D)
    if inner:
        expected |= {"inner_weight": (inner, r, r, D), "inner_bias": (inner, r, r)}
    assert {key: tuple(value.shape) for key, value in head.state_dict().items()} == expected
    leaf, root, sums, _ = head(hidden_states())
    assert leaf.shape == (B, n, r, V)
    assert root.shape == (B, r)
    assert sums.shape == (B, inner, r, r)


def start_distance(name: str, n: int, zero_bias: bool = False) -> tuple[float, float]:
    """(total variation, smallest log q - log q_cp) between a new head and the CP with the same leaves and root."""
    cp, head = heads_zoo.build("linear", "cp", 3, n, 3, std=1.0), build(name, n, 3, vocab=3)
    head.leaf_weight.copy_(cp.leaf_weight)
    head.root_weight.copy_(cp.root_weight)
    if zero_bias:
        head.inner_bias.zero_()
    hidden, tokens = hidden_states(1), all_tokens(n, 3)

    def joint(model: LinearHead) -> torch.Tensor:
        params: CircuitParams = repeated(model(hidden), 0, len(tokens))
        return model.circuit.log_prob(params, tokens)

    ours, theirs = joint(head), joint(cp)
    return (ours.exp() - theirs.exp()).abs().sum().item() / 2, (ours - theirs).min().item()


@pytest.mark.parametrize("n", [4, 5, 6])
@pytest.mark.parametrize("name", ["hmm", "btree"])
def test_hmm_and_btree_start_close_to_the_cp_with_the_same_leaves(name, n):
    """With probability s = 0.95 ** (number of sums) no latent ever changes, and then the distribution is the CP's.

    So the start is q = s * q_cp + (1 - s) * other: the total variation is at most 1 - s, and log q is nowhere more
    than -log s below log q_cp. The weights of the sums (std 0.01, |h| about 4) move s by about 0.2 % per sum.
    """
    sums = n - 1 if name == "hmm" else len(INNER_REGIONS[n])
    stay = (STAY_PROBABILITY - 0.01) ** sums
    variation, lowest = start_distance(name, n)
    assert variation <= 1 - stay
    assert lowest >= math.log(stay)
    assert variation > 0  # not the CP itself: the sums can be trained


@pytest.mark.parametrize("name", ["hmm", "btree"])
def test_fault_of_uniform_sums_is_found(name):
    """The control of the test above: the same bound is broken by sums that start uniform."""
    variation, lowest = start_distance(name, 5, zero_bias=True)
    stay = (STAY_PROBABILITY - 0.01) ** len(INNER_REGIONS[5] if name == "btree" else range(4))
    assert variation > 1 - stay
    assert lowest < math.log(stay)


@pytest.mark.parametrize("name", ["hmm", "btree"])
@pytest.mark.parametrize("r", [1, 2, 8])
def test_sums_keep_the_latent_with_the_documented_probability(name, r):
    inner = build(name, 5, r)(torch.zeros(1, D)).inner.exp()
    diagonal = inner.diagonal(dim1=-2, dim2=-1)
    expected = 1.0 if r == 1 else STAY_PROBABILITY
    torch.testing.assert_close(diagonal, torch.full_like(diagonal, expected))


@ALL
def test_head_started_from_lm_head_predicts_as_the_target(name):
    head = build(name)
    lm_head = torch.randn(V, D, generator=torch.Generator().manual_seed(3))
    head.init_from_lm_head(lm_head, seed=0)
    hidden = hidden_states()
    target = (hidden @ lm_head.T).log_softmax(-1)[:, None, None]
    # Noise of std 0.01 D^-1/2 per weight moves a logit by 0.01 |h| D^-1/2 (one sigma); 5 sigma, twice (normaliser).
    sigma = INIT_STD * hidden.norm(dim=1).max() * D**-0.5
    difference = (head(hidden).leaf - target).abs()
    assert difference.max() < 2 * 5 * sigma
    assert difference.mean() < sigma


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: the same head there and on a CPU")
def test_a_head_on_the_gpu_starts_from_the_same_numbers():
    head, lm_head = build("cp", 3, 2), torch.randn(V, D, generator=torch.Generator().manual_seed(3))
    head.init_from_lm_head(lm_head, seed=0)
    expected = head.leaf_weight.clone()
    head.cuda().init_from_lm_head(lm_head.cuda(), seed=0)
    torch.testing.assert_close(head.leaf_weight.cpu(), expected)
