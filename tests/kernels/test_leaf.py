"""Logits of leaves: the kernel against its definition, interpreted on a CPU, natively on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support import interpreted
from tests.support.kernel_cases import TERMS, WHOLE, numbers
from vllm_mtpc.kernels import leaf
from vllm_mtpc.kernels.leaf import naive

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def terms() -> dict[str, Tensor]:
    return interpreted.run({name: ("leaf", case) for name, case in TERMS.items()}, {"leaf": "terms"})


@pytest.mark.parametrize("name", TERMS)
def test_terms_equal_their_definition(name: str, terms: dict[str, Tensor]) -> None:
    states, weight, token = TERMS[name]
    assert terms["poison"].isnan().all() and terms[name].dtype == WHOLE
    # sums of up to 150 products of about 1 / 12 in another order, in float32
    wanted = naive.terms(states.float(), weight.float(), token)
    torch.testing.assert_close(terms[name], wanted, rtol=1e-5, atol=1e-5)
    is_outside = (token < 0) | (token >= weight.shape[1])
    assert torch.equal(terms[name][:, 1] == -torch.inf, is_outside[:, None].expand(-1, weight.shape[0]))


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
    norm, picked = naive.terms_of(logits, token).unbind(1)
    torch.testing.assert_close(picked - norm, logits.log_softmax(-1)[torch.arange(6), :, token])
