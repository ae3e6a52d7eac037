"""Logits of leaves: the kernels against their definition, interpreted on a CPU, natively on a GPU; float8 weights."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from tests.support import interpreted
from vllm_mtpc.kernels import leaf
from vllm_mtpc.kernels.leaf import fp8, naive

torch.set_num_threads(1)
NO_TRITON = "triton is not installed: only the PyTorch definitions can be tested here (pip install triton)"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NO_TRITON)
HAS_FP8 = not interpreted.ON_GPU or fp8.is_fast_on(torch.device("cuda"))
HALF, WHOLE = torch.bfloat16, torch.float32


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = WHOLE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def term_case(batch: int, r: int, vocab: int, hidden: int, dtype: torch.dtype, shared: bool, eight: bool) -> tuple:
    """Arguments of `terms`: states with NaN behind every row; the first, the last, and tokens that are not there."""
    states = torch.full((batch, 1 if shared else r, hidden + 3), torch.nan, dtype=dtype)[..., :hidden]
    states.copy_(numbers(batch, states.shape[1], hidden, dtype=dtype))
    weight = numbers(r, vocab, hidden, seed=1) / hidden**0.5
    token = torch.randint(vocab, (batch,), generator=torch.Generator().manual_seed(batch))
    for row, chosen in enumerate((vocab - 1, 0, -1, vocab, vocab + 5)[:batch]):
        token[row] = chosen
    return states, *stored(weight, dtype, eight), token


def logit_case(batch: int, shape: tuple[int, int], weight: tuple[int, int, int, int], dtype: torch.dtype) -> tuple:
    hidden = weight[3]
    return numbers(batch, *shape, hidden, dtype=dtype), *stored(numbers(*weight, seed=1) / hidden**0.5, dtype, True)


def stored(weight: Tensor, dtype: torch.dtype, eight: bool) -> tuple[Tensor, Tensor | None]:
    """As the kernels take them: float8 as bytes, which is also all of it that can be pickled."""
    if not eight:
        return weight.to(dtype), None
    weight, scale = fp8.quantise(weight)
    return weight.view(torch.uint8), scale


# 64 rows of a vocabulary and up to 64 states are one tile; 128 (half precision) or 32 elements of D at a time
TERMS = {
    "one": term_case(1, 1, 5, 16, WHOLE, True, False),
    "a block but one": term_case(3, 2, 63, 33, WHOLE, False, False),
    "a block": term_case(5, 3, 64, 32, WHOLE, True, False),
    "more blocks than one": term_case(17, 2, 257, 130, HALF, True, False),
    "more states than a tile has": term_case(65, 2, 70, 16, HALF, False, False),
    "half": term_case(3, 2, 65, 40, torch.float16, False, False),
    "eight": term_case(3, 2, 130, 150, HALF, True, True),
    "eight, of each component": term_case(17, 3, 63, 40, WHOLE, False, True),
}
LOGITS = {
    "shared": logit_case(3, (1, 1), (2, 3, 65, 150), HALF),
    "of each position": logit_case(17, (3, 1), (3, 2, 63, 40), HALF),
    "of each component": logit_case(1, (2, 2), (2, 2, 130, 16), torch.float16),
    "float32": logit_case(66, (1, 1), (1, 2, 64, 33), WHOLE),
}
if not HAS_FP8:  # bytes cannot be read as float8_e4m3fn there, and nothing asks for it
    LOGITS, TERMS = {}, {name: case for name, case in TERMS.items() if case[2] is None}


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
