"""The filter of the circuits: its definition against enumeration, the kernel and its backward against the definition.

The reference is `naive.py` in float64, of the numbers that the kernel reads.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.support import filter_cases, interpreted
from tests.support.enumeration import CIRCUITS, make
from tests.support.filter_cases import CASES, INF, Case, case, training_gradients
from vllm_mtpc.kernels.filter import filter_weights, naive

torch.set_num_threads(1)
RULED_OUT = -1e6


def reference(given: Case) -> tuple[Tensor, ...]:
    """Weights and gradients of the definition in float64."""
    # A column of -inf is NaN in the gradient of PyTorch's logsumexp; exp(RULED_OUT) is 0 in float64 just as well.
    inputs = [part.double().clamp(min=RULED_OUT).requires_grad_(True) for part in given[1:4]]
    weights = naive.filter_weights(given.program, *inputs)
    grads = torch.autograd.grad(weights, inputs, given.upstream.double(), materialize_grads=True)
    return weights.detach().masked_fill(weights < RULED_OUT / 2, -INF), *grads


@pytest.fixture(scope="module")
def outputs() -> dict:
    return interpreted.launch(filter_cases.launch_all, CASES)


def close(got: Tensor, wanted: Tensor, rtol: float = 2e-6) -> None:
    """Float32 rounding, over up to 50 steps, of numbers as large as the largest."""
    largest = wanted[wanted.isfinite()].abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=rtol * max(1.0, largest))


def enumerated(name: str, n: int, evidence: Tensor, root: Tensor, inner: Tensor) -> Tensor:
    """log pi [m, r] of one circuit: every assignment of its latents, summed."""
    r = root.shape[-1]
    parents, owner = make(name, n, r).latents
    states = torch.tensor(list(product(range(r), repeat=1 + len(parents))))
    terms = root.log_softmax(-1)[states[:, 0]]
    for f, parent in enumerate(parents):
        terms = terms + inner.log_softmax(-1)[f][states[:, parent], states[:, f + 1]]
    columns = []
    for k in range(len(evidence)):
        reads = states[:, owner[k]]
        columns.append(torch.stack([terms[reads == z].logsumexp(0) for z in range(r)]).log_softmax(-1))
        terms = terms + evidence[k][reads]
    return torch.stack(columns)


@pytest.mark.parametrize("n, r, m", [(2, 3, 2), (3, 2, 3), (5, 2, 5), (7, 2, 6)])
@pytest.mark.parametrize("name", CIRCUITS)
def test_definition_and_its_gradients_equal_enumeration(name: str, n: int, r: int, m: int) -> None:
    given = case(name, n, r, 2, m)
    inputs = [part.double().requires_grad_(True) for part in given[1:4]]
    got = filter_weights(given.program, *inputs)
    wanted = torch.stack([enumerated(name, n, *(part[b] for part in inputs)) for b in range(2)])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)  # float64 throughout
    upstream = given.upstream.double()
    by_filter, by_sum = (torch.autograd.grad(x, inputs, upstream, materialize_grads=True) for x in (got, wanted))
    for one, other in zip(by_filter, by_sum, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CIRCUITS)
def test_impossible_latents_give_no_nan(name: str) -> None:
    given = CASES[f"holes-{name}"]._replace(inner=case(name, 7, 4, 2, 7).inner)
    inputs = [part.clone().requires_grad_(True) for part in given[1:4]]
    weights = filter_weights(given.program, *inputs)
    given = given._replace(upstream=given.upstream.masked_fill(weights == -INF, 0.0))
    grads = torch.autograd.grad(weights, inputs, given.upstream, materialize_grads=True)
    for got, wanted in zip(grads, reference(given)[1:], strict=True):
        close(got, wanted, rtol=1e-5)  # float32 rounding over some 30 steps; NaN equals nothing


def test_half_precisions_are_read_as_float32() -> None:
    given = CASES["bfloat16"]
    got = filter_weights(given.program, *given[1:4])
    assert torch.equal(got, filter_weights(given.program, *(part.float() for part in given[1:4])))


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_its_definition(name: str, outputs: dict) -> None:
    given, wanted = CASES[name], reference(CASES[name])
    assert outputs[name][0].dtype == torch.float32
    close(outputs[name][0], wanted[0])
    for got, exact, read in zip(outputs[name][1:], wanted[1:], given[1:4], strict=True):
        assert got.dtype == read.dtype and got.shape == read.shape and got.isfinite().all()
        # A gradient of half precision is the float32 one, rounded. Log weights near -500 (one-hot, wide) carry an
        # absolute error of 500 * 6e-8, their exponentials a relative one.
        far = name.startswith(("one-hot", "wide"))
        close(got, exact, rtol=torch.finfo(read.dtype).eps if read.dtype != torch.float32 else 1e-4 if far else 1e-5)


def test_kernel_repeats_itself_and_does_not_depend_on_the_batch(outputs: dict) -> None:
    first = outputs[next(iter(CASES))]
    assert all(torch.equal(one, other) for one, other in zip(first, outputs["again"], strict=True))
    assert all(torch.equal(one[1:2], other) for one, other in zip(first, outputs["alone"], strict=True))


@pytest.mark.parametrize("name", CIRCUITS)
def test_training_through_the_kernel(name: str, outputs: dict) -> None:
    """Loss and gradients of a head, likelihood and distribution terms, in recomputed chunks: as with the definition."""
    for got, wanted in zip(outputs["trained"][name], training_gradients(name), strict=True):
        close(got, wanted.double(), rtol=1e-5)  # float32 on both sides
