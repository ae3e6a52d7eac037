"""The kernels of couple, leaf, pick and uniform against their definitions: interpreted on a CPU, natively on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import interpreted
from tests.support.kernel_cases import CASES, INF, numbers, rows
from vllm_mtpc.kernels import leaf
from vllm_mtpc.kernels.couple import naive as couple_naive
from vllm_mtpc.kernels.leaf import naive as leaf_naive
from vllm_mtpc.kernels.pick import naive as pick_naive
from vllm_mtpc.kernels.uniform import naive as uniform_naive

torch.set_num_threads(1)

EDGE, AT_EDGE = 1e-6, 1e-3  # tokens may differ where u is as close as this to an edge, in less than this share of draws


@pytest.fixture(scope="module")
def outputs() -> dict[str, Any]:
    return interpreted.run(CASES)


def of(operation: str, *others: str) -> pytest.MarkDecorator:
    names = [name for name, case in CASES.items() if case[0] == operation and name not in others]
    return pytest.mark.parametrize("name", names)


@of("couple")
def test_accept_equals_its_definition(name: str, outputs: dict[str, Any]) -> None:
    (kept, count), wanted = outputs[name], couple_naive.accept(*CASES[name][1])
    assert torch.equal(kept, wanted[0]) and torch.equal(count, wanted[1])
    assert kept.dtype == torch.int64 and count.dtype == torch.int32


def test_accept_keeps_results_of_other_requests(outputs: dict[str, Any]) -> None:
    (kept, count), (alone, _) = outputs["next to others"], couple_naive.accept(*rows(30, 8))
    assert (kept[::3] == 7).all() and (count[::3] == 7).all() and torch.equal(kept[1::3], alone[1::3])


@of("leaf")
def test_terms_equal_their_definition(name: str, outputs: dict[str, Any]) -> None:
    states, weight, token = CASES[name][1]
    assert outputs["poison"].isnan().all() and outputs[name].dtype == torch.float32
    # sums of up to 150 products of about 1 / 12 in another order, in float32
    wanted = leaf_naive.terms(states.float(), weight.float(), token)
    torch.testing.assert_close(outputs[name], wanted, rtol=1e-5, atol=1e-5)
    is_outside = (token < 0) | (token >= weight.shape[1])
    assert torch.equal(outputs[name][:, 1] == -INF, is_outside[:, None].expand(-1, weight.shape[0]))


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 3), (4, 3)])
def test_logits_are_products_with_each_unembedding(shape: tuple[int, int]) -> None:
    states, weight = numbers(2, *shape, 8), numbers(4, 3, 5, 8)
    found = leaf.logits(states, weight)
    for k in range(4):
        for z in range(3):
            state = states[:, min(k, shape[0] - 1), min(z, shape[1] - 1)]
            torch.testing.assert_close(found[:, k, z], state @ weight[k, z].T)  # other orders of summation


def test_terms_are_those_of_log_softmax() -> None:
    logits, token = numbers(6, 3, 9) * 5, torch.tensor([0, 8, 3, 4, 4, 1])
    norm, picked = leaf_naive.terms_of(logits, token).unbind(1)
    torch.testing.assert_close(picked - norm, logits.log_softmax(-1)[torch.arange(6), :, token])


@of("uniform")
def test_uniform_bit_for_bit(name: str, outputs: dict[str, Any]) -> None:
    wanted = uniform_naive.uniform(*CASES[name][1])
    assert outputs[name].dtype == torch.float32
    assert torch.equal(outputs[name].view(torch.int32), wanted.view(torch.int32))


def at_an_edge(logits: Tensor, u: Tensor) -> Tensor:
    """Whether u lies within EDGE of an edge of the distribution function in float64."""
    logits = torch.where(logits.isnan(), -INF, logits).double()
    mass = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    distribution = mass.cumsum(dim=-1) / mass.sum(dim=-1, keepdim=True)
    return (distribution - u.double()[:, None]).abs().amin(dim=-1) < EDGE


@of("pick", "edges")
def test_pick_equals_its_definition(name: str, outputs: dict[str, Any]) -> None:
    (logits, u), got = CASES[name][1], outputs[name]
    wanted = pick_naive.pick(logits, u)
    assert got.dtype == torch.int64 and got.shape == wanted.shape
    differs = got != wanted
    assert not (differs & ~at_an_edge(logits, u)).any() and differs.sum() <= max(1, AT_EDGE * len(u))
    assert name == "empty rows" or (logits.gather(1, got[:, None]) > -INF).all(), "a token without mass"


def test_pick_at_exact_edges_and_in_any_batch(outputs: dict[str, Any]) -> None:
    """Token k/64 of the vocabulary begins at u = k/64 exactly."""
    assert outputs["edges"].tolist() == list(range(0, 8192, 128))
    assert outputs["alone"][0] == outputs["150x13000"][7]
