"""Logits of leaves: the kernels against their definition, interpreted on a CPU, natively on a GPU; float8 weights."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from tests.support import interpreted
from tests.support.kernel_cases import HALF, LOGITS, TERMS, WHOLE, numbers
from vllm_mtpc.kernels import leaf
from vllm_mtpc.kernels.leaf import fp8, naive

torch.set_num_threads(1)
NO_TRITON = "triton is not installed: only the PyTorch definitions can be tested here (pip install triton)"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NO_TRITON)


@pytest.fixture(scope="module")
def terms() -> dict[str, Tensor]:
    return interpreted.run({name: ("leaf", case) for name, case in TERMS.items()}, {"leaf": "terms"})


@pytest.fixture(scope="module")
def logits() -> dict[str, Tensor]:
    return interpreted.run({name: ("leaf", case) for name, case in LOGITS.items()}, {"leaf": "logits"})


def plainly(states: Tensor, weight: Tensor, scale: Tensor | None, *more: Tensor) -> tuple:
    """The same numbers in float32, which the kernels accumulate in."""
    if scale is not None:
        weight = fp8.dequantise(weight.view(fp8.FORMAT), scale, WHOLE)
    return states.float(), weight.float(), None, *more


@needs_triton
@pytest.mark.parametrize("name", TERMS)
def test_terms_equal_their_definition(name: str, terms: dict[str, Tensor]) -> None:
    case = TERMS[name]
    assert terms["poison"].isnan().all() and terms[name].dtype == WHOLE
    # sums of up to 150 products of about 1 / 12 in another order, in float32
    torch.testing.assert_close(terms[name], naive.terms(*plainly(*case)), rtol=1e-5, atol=1e-5)
    token, vocab = case[3], case[1].shape[1]
    assert torch.equal(
        terms[name][:, 1] == -torch.inf, ((token < 0) | (token >= vocab))[:, None].expand_as(terms[name][:, 1])
    )


@needs_triton
@pytest.mark.parametrize("name", LOGITS)
def test_logits_equal_their_definition(name: str, logits: dict[str, Tensor]) -> None:
    case = LOGITS[name]
    wanted = naive.logits(*plainly(*case))
    assert logits[name].dtype == case[0].dtype and logits[name].shape == wanted.shape
    # float32 sums in another order, then the dtype of the states: a unit in its last place, as the interpreter cuts
    rounding = torch.finfo(case[0].dtype).eps
    torch.testing.assert_close(logits[name].float(), wanted, rtol=max(1.01 * rounding, 1e-5), atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 3), (4, 3)])
def test_logits_are_products_with_each_unembedding(shape: tuple[int, int]) -> None:
    states, weight = numbers(2, *shape, 8), numbers(4, 3, 5, 8)
    found = leaf.logits(states, weight, None)
    for k in range(4):
        for z in range(3):
            state = states[:, min(k, shape[0] - 1), min(z, shape[1] - 1)]
            torch.testing.assert_close(found[:, k, z], state @ weight[k, z].T)  # other orders of summation


def test_terms_are_those_of_log_softmax() -> None:
    logits, token = numbers(6, 3, 9) * 5, torch.tensor([0, 8, 3, 4, 4, 1])
    norm, picked = naive.terms_of(logits, token).unbind(1)
    torch.testing.assert_close(picked - norm, logits.log_softmax(-1)[torch.arange(6), :, token])


def test_float8_is_as_near_as_its_format_allows() -> None:
    weight = numbers(3, 50, 64) * torch.logspace(-12, 6, 50)[:, None]
    weight[1, 4] = 0
    weight[0, 7, 3] = 1e-30
    small, scale = fp8.quantise(weight)
    assert small.dtype == fp8.FORMAT and scale.shape == (3, 50) and scale.dtype == WHOLE
    back = fp8.dequantise(small, scale, WHOLE)
    # 3 bits behind the point: half of 2^-3 relative; below 2^-6 scales, numbers are 2^-9 scales apart
    bound = torch.maximum(weight.abs() * 2.0**-4, scale[..., None] * 2.0**-10)
    assert ((back - weight).abs() <= bound).all() and not back[1, 4].any()
    assert torch.equal(fp8.dequantise(small, scale, HALF).float(), back), "exact in bfloat16"
    assert (small.float().abs().amax(-1)[weight.abs().amax(-1) > 0] >= 224).all(), "the range of the format is used"
