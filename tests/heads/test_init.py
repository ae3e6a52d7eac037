"""Where training starts: close to a CP, at the target's lm_head (one or several), or at a head of another circuit."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.circuit_checks import SMALL, build, check_growth_from_a_cp, check_growth_from_an_ff, joint
from tests.support.enumeration import CIRCUITS, TREES, inner_regions
from tests.support.heads_zoo import OPTIONS, D, V, bind_target, hidden_states
from vllm_mtpc.circuits import circuit_class
from vllm_mtpc.heads.head import STAY_PROBABILITY
from vllm_mtpc.heads.init import init_from_head, init_from_lm_head
from vllm_mtpc.heads.leaves.base import INIT_STD

torch.set_num_threads(1)
MIXTURES = [name for name in CIRCUITS if circuit_class(name).max_components > 1]


@pytest.mark.parametrize("n", [4, 5, 6])
@pytest.mark.parametrize("name", ["hmm", "btree"])
def test_hmm_and_btree_start_close_to_the_cp_with_the_same_leaves(name, n):
    """With probability s = 0.95 ** (number of sums) no latent ever changes, and then the distribution is the CP's.

    So the start is q = s * q_cp + (1 - s) * other: the total variation is at most 1 - s, and log q is nowhere more
    than -log s below log q_cp. The weights of the sums (std 0.01, |h| about 4) move s by about 0.2 % per sum.
    """
    stay = (STAY_PROBABILITY - 0.01) ** (n - 1 if name == "hmm" else len(inner_regions(TREES[n])))
    cp, head = build("cp", 3, n=n, vocab=SMALL, std=1.0), build(name, 3, n=n, vocab=SMALL)
    head.leaves.leaf_weight.copy_(cp.leaves.leaf_weight)
    head.root_weight.copy_(cp.root_weight)

    def start_distance() -> tuple[float, float]:
        ours, theirs = joint(head), joint(cp)
        return (ours.exp() - theirs.exp()).abs().sum().item() / 2, (ours - theirs).min().item()

    variation, lowest = start_distance()
    assert 0 < variation <= 1 - stay and lowest >= math.log(stay)  # not the CP itself: the sums can be trained
    if n == 5:  # the fault: sums that start uniform
        head.inner_bias.zero_()
        variation, lowest = start_distance()
        assert variation > 1 - stay and lowest < math.log(stay)


# ---- from the target's lm_head --------------------------------------------------------------------


@pytest.mark.parametrize("blocks, n", [(1, 4), (8, 4), (8, 8), (8, 11)])
def test_position_i_starts_from_prediction_head_i_and_later_ones_from_the_last(blocks, n):
    weight = torch.randn(blocks * V, D, generator=torch.Generator().manual_seed(5))
    head = build("cp", 2, "linear", n)
    init_from_lm_head(head, weight, seed=0)
    for k in range(n):
        block = weight.view(blocks, V, D)[min(k, blocks - 1)]
        noise = head.leaves.leaf_weight[k] - block
        assert 0.5 < noise.std() / (INIT_STD * D**-0.5) < 1.5  # 224 draws: 5 % relative error
    assert (
        len({tuple(leaf.flatten().tolist()) for leaf in head.leaves.leaf_weight.flatten(0, 1)}) == 2 * n
    )  # all differ
    again = build("cp", 2, "linear", n)
    init_from_lm_head(again, weight, seed=0)
    assert torch.equal(again.leaves.leaf_weight, head.leaves.leaf_weight)
    init_from_lm_head(again, weight, seed=1)
    assert not torch.equal(again.leaves.leaf_weight, head.leaves.leaf_weight)


# ---- from another head ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("circuit", CIRCUITS)
def test_the_same_circuit_is_copied(name, circuit):
    r = min(3, circuit_class(circuit).max_components)
    source, head = build(circuit, r, name, std=0.3), build(circuit, r, name)
    init_from_head(head, source)
    expected = source.state_dict()
    assert set(head.state_dict()) == set(expected)
    assert all(torch.equal(value, expected[key]) for key, value in head.state_dict().items())


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("circuit, n, sums", [("hmm", 4, 3), ("hmm", 6, 5), ("btree", 4, 2), ("btree", 6, 4)])
def test_a_cp_becomes_an_hmm_or_a_btree_of_nearly_the_same_distribution(name, circuit, n, sums):
    check_growth_from_a_cp(name, circuit, n, sums)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("circuit", MIXTURES)
def test_ff_becomes_a_mixture_of_copies(name, circuit):
    check_growth_from_an_ff(name, circuit)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("circuit", MIXTURES)
def test_more_components_repeat_the_distribution(name, circuit, monkeypatch):
    source, head = build(circuit, 2, name, vocab=SMALL, std=0.3), build(circuit, 6, name, vocab=SMALL)
    init_from_head(head, source)
    assert not torch.equal(joint(head), joint(source))
    monkeypatch.setattr("vllm_mtpc.heads.init.INIT_STD", 0.0)
    init_from_head(head, source)
    torch.testing.assert_close(joint(head), joint(source), rtol=0, atol=2e-5)  # float32 rounding near -10


@pytest.mark.parametrize("name, skip", [("linear", 0), ("shared", 0), ("mlp", 1), ("mlp low rank", 1)])
@pytest.mark.parametrize("circuit, r", [("ff", 1), *((circuit, r) for circuit in MIXTURES for r in (1, 3))])
def test_a_smaller_window_is_extended_by_its_last_position(circuit, r, name, skip, monkeypatch):
    monkeypatch.setattr("vllm_mtpc.heads.init.INIT_STD", 0.0)  # components start equal
    source, head = build("ff", 1, name, 2, vocab=SMALL, std=0.3), build(circuit, r, name, 4, vocab=SMALL)
    init_from_head(head, source)
    bind_target(head, SMALL)
    given, first = hidden_states(1), torch.zeros(1, dtype=torch.long)
    ours, theirs = (one.leaves(one.trunk(given, first)[1], skip, one.circuit.window) for one in (head, source))
    wanted = torch.cat([theirs, theirs[:, -1:].repeat(1, 2, 1, 1)], 1)
    torch.testing.assert_close(ours, wanted.expand_as(ours), rtol=0, atol=1e-5)  # float32 rounding near -10


@pytest.mark.parametrize("of_one, of_several, ids", [("shared", "low rank", None), ("mlp", "mlp low rank", [0, 2])])
@pytest.mark.parametrize("circuit", MIXTURES)
def test_one_component_becomes_equal_ones_that_diverge(of_one, of_several, ids, circuit):
    source = build("ff", 1, of_one, vocab=SMALL, std=0.3, ids=ids)
    head = build(circuit, 4, of_several, vocab=SMALL, ids=ids and [0, 1])
    assert ids is None or head.vocabulary.ids.tolist() != ids
    init_from_head(head, source)  # takes the source's ids
    bind_target(head, SMALL)
    torch.testing.assert_close(joint(head), joint(source), rtol=0, atol=1e-5)  # float32 rounding near -10
    head.requires_grad_(True)
    tokens = torch.zeros(1, head.circuit.window, dtype=torch.long)
    (-head.circuit.log_prob(head(hidden_states(1), tokens[:, 0]), tokens).mean()).backward()
    head.requires_grad_(False).leaves.component_out.sub_(head.leaves.component_out.grad)
    leaf = head(hidden_states(1), tokens[:, 0]).leaf[0]
    assert all(not torch.equal(leaf[:, 0], leaf[:, z]) for z in range(1, 4))
