"""The filter of the circuits: the kernel and its backward against the definition (tests/circuits: against enumeration).

The reference is `naive.py` in float64, of the numbers that the kernel reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support import interpreted
from tests.support.enumeration import CIRCUITS, make
from tests.support.interpreted import moved
from vllm_mtpc.kernels.filter import Program, filter_weights, naive

INF = float("inf")
# circuit, n, r, batch, m: every n, r and batch of each circuit at least once; m < n leaves regions open.
SIZES = [
    ("btree", 8, 7, 3, 8), ("btree", 2, 2, 64, 2), ("btree", 3, 1, 3, 3), ("btree", 8, 8, 1, 5),
    ("btree", 15, 2, 1, 15), ("btree", 16, 32, 1, 16), ("btree", 16, 8, 1, 11),
    ("hmm", 2, 7, 64, 2), ("hmm", 3, 2, 3, 3), ("hmm", 8, 8, 1, 8), ("hmm", 15, 32, 1, 15), ("hmm", 16, 1, 1, 9),
    ("cp", 2, 1, 3, 2), ("cp", 3, 7, 64, 3), ("cp", 8, 2, 1, 1), ("cp", 15, 8, 1, 15), ("cp", 16, 32, 3, 16),
    ("ff", 2, 1, 64, 2), ("ff", 3, 1, 1, 3), ("ff", 8, 1, 3, 8), ("ff", 15, 1, 1, 15), ("ff", 16, 1, 1, 15),
]  # fmt: skip


class Case(NamedTuple):
    program: Program
    evidence: Tensor  # [B, m, r]
    root: Tensor  # [B, r]
    inner: Tensor  # [B, F, r, r]
    upstream: Tensor  # [B, m, r], gradient of the weights


def case(name: str, n: int, r: int, batch: int, m: int, scale: float = 1.5) -> Case:
    circuit, generator = make(name, n, r), torch.Generator().manual_seed(n + r)
    r = circuit.num_components

    def randn(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator) * scale

    return Case(circuit.program, randn(m, r) - 3 * scale, randn(r), randn(circuit.num_inner, r, r), randn(m, r) / scale)


def strided(given: Case) -> Case:
    """The same numbers with NaN after and between the rows, and in another order in memory."""
    apart = []
    for part in (given.evidence, given.root, given.inner):
        wide = torch.full((*part.shape[:-1], part.shape[-1] + 3), float("nan"))
        wide[..., : part.shape[-1]] = part
        apart.append(wide[..., : part.shape[-1]])
    return Case(given.program, *apart, given.upstream.transpose(0, 1).contiguous().transpose(0, 1))


def holes(name: str, r: int = 4) -> Case:
    """Latents that a token, the root or a row rules out (never all of them), and tokens that are marginalised."""
    given = case(name, 7, r, 2, 7)
    first = torch.arange(given.root.shape[-1]) == 0  # the latent that stays
    generator = torch.Generator().manual_seed(1)

    def ruled_out(x: Tensor) -> Tensor:
        return x.masked_fill((torch.rand(x.shape, generator=generator) < 0.4) & ~first, -INF)

    given.evidence[1, ::3] = 0.0
    given = given._replace(evidence=ruled_out(given.evidence), root=ruled_out(given.root), inner=ruled_out(given.inner))
    weights = naive.filter_weights(given.program, given.evidence, given.root, given.inner)
    assert name == "ff" or (weights == -INF).any()
    return given._replace(upstream=given.upstream.masked_fill(weights == -INF, 0.0))  # as from exp or logsumexp


def one_hot(name: str) -> Case:
    """Evidence and sums that leave one latent, others at exp(-200), no float32."""
    given = case(name, 8, 8, 1, 8)
    certain = given.root.shape[-1] > 1
    evidence = (given.evidence - given.evidence.amax(-1, keepdim=True)) * 200 * certain
    inner = torch.eye(8).expand_as(given.inner) * 200 if given.inner.numel() else given.inner
    return given._replace(evidence=evidence, root=given.root * 100 * certain, inner=inner)


def half(dtype: torch.dtype) -> Case:
    given = case("btree", 8, 7, 2, 8)
    return Case(given.program, *(part.to(dtype) for part in given[1:4]), given.upstream)


CASES: dict[str, Case] = {
    **{"-".join(map(str, size)): case(*size) for size in SIZES},
    **{f"holes-{name}": holes(name) for name in CIRCUITS},
    **{f"one-hot-{name}": one_hot(name) for name in CIRCUITS},
    "wide-btree": case("btree", 7, 3, 2, 7, scale=30.0),
    "bfloat16": half(torch.bfloat16),
    "float16": half(torch.float16),
    "strided": strided(case("btree", 8, 7, 3, 8)),
    "no circuits": case("btree", 5, 2, 0, 5),
}


def launch_all(cases: dict[str, Case], device: str) -> dict:
    """Return weights and gradients of evidence, root and inner of each case; "again": of the first one run twice;
    "alone": of its circuit 1 without the others."""
    from vllm_mtpc.kernels.filter.kernel import filter_weights

    first = next(iter(cases.values()))
    others = {"again": first, "alone": Case(first[0], *(part[1:2] for part in first[1:]))}
    return {name: _outcome(filter_weights, case, device) for name, case in {**cases, **others}.items()}


def _outcome(filter_weights: Callable[..., Tensor], case: Case, device: str) -> tuple[Tensor, ...]:
    inputs = [moved(part, device).requires_grad_(True) for part in case[1:4]]
    with torch.no_grad():
        plain = filter_weights(case.program, *inputs)
    weights = filter_weights(case.program, *inputs)
    assert torch.equal(plain, weights), "the tape changed the weights"
    grads = torch.autograd.grad(weights, inputs, case.upstream.to(device))
    return tuple(part.detach().cpu().clone() for part in (weights, *grads))


torch.set_num_threads(1)
RULED_OUT = -1e6


def reference(given: Case) -> tuple[Tensor, ...]:
    """Weights and gradients of the definition in float64."""
    # A column of -inf is NaN in the gradient of PyTorch's logsumexp; exp(RULED_OUT) is 0 in float64 just as well.
    inputs = [part.double().clamp(min=RULED_OUT).requires_grad_(True) for part in given[1:4]]
    weights = naive.filter_weights(given.program, *inputs)
    grads = torch.autograd.grad(weights, inputs, given.upstream.double(), materialize_grads=True)
    return weights.detach().masked_fill(weights < RULED_OUT / 2, -INF), *grads


@pytest.fixture(scope="module", params=interpreted.INTERPRETERS)
def outputs(request: pytest.FixtureRequest) -> dict:
    return interpreted.launch(launch_all, CASES, request.param)


def close(got: Tensor, wanted: Tensor, rtol: float = 2e-6) -> None:
    """Float32 rounding, over up to 50 steps, of numbers as large as the largest."""
    largest = wanted[wanted.isfinite()].abs().max().item() if wanted.numel() else 0.0
    torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=rtol * max(1.0, largest))


@pytest.mark.parametrize("name", CIRCUITS)
def test_impossible_latents_give_no_nan(name: str) -> None:
    given = CASES[f"holes-{name}"]._replace(inner=case(name, 7, 4, 2, 7).inner)
    inputs = [part.clone().requires_grad_(True) for part in given[1:4]]
    weights = filter_weights(given.program, *inputs)
    given = given._replace(upstream=given.upstream.masked_fill(weights == -INF, 0.0))
    grads = torch.autograd.grad(weights, inputs, given.upstream, materialize_grads=True)
    for got, wanted in zip(grads, reference(given)[1:], strict=True):
        close(got, wanted, rtol=1e-5)  # float32 rounding over some 30 steps; NaN equals nothing


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
