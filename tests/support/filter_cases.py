"""Inputs of the filter kernel, for its tests and for comparing interpreters."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.enumeration import CIRCUITS, make
from tests.support.filter_runner import Case
from vllm_mtpc.kernels.filter import naive

INF = float("inf")
# circuit, n, r, batch, m: every n, r and batch of each circuit at least once; m < n leaves regions open.
SIZES = [
    ("btree", 8, 7, 3, 8), ("btree", 2, 2, 64, 2), ("btree", 3, 1, 3, 3), ("btree", 8, 8, 1, 5),
    ("btree", 15, 2, 1, 15), ("btree", 16, 32, 1, 16), ("btree", 16, 8, 1, 11),
    ("hmm", 2, 7, 64, 2), ("hmm", 3, 2, 3, 3), ("hmm", 8, 8, 1, 8), ("hmm", 15, 32, 1, 15), ("hmm", 16, 1, 1, 9),
    ("cp", 2, 1, 3, 2), ("cp", 3, 7, 64, 3), ("cp", 8, 2, 1, 1), ("cp", 15, 8, 1, 15), ("cp", 16, 32, 3, 16),
    ("ff", 2, 1, 64, 2), ("ff", 3, 1, 1, 3), ("ff", 8, 1, 3, 8), ("ff", 15, 1, 1, 15), ("ff", 16, 1, 1, 15),
]  # fmt: skip


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
    return given._replace(
        evidence=(given.evidence - given.evidence.amax(-1, keepdim=True)) * 200 * certain,
        root=given.root * 100 * certain,
        inner=torch.eye(8).expand_as(given.inner) * 200 if given.inner.numel() else given.inner,
    )


def flat(name: str) -> Case:
    given = case(name, 8, 8, 1, 8)
    return Case(given.program, *(torch.zeros_like(part) for part in given[1:4]), given.upstream)


def half(dtype: torch.dtype) -> Case:
    given = case("btree", 8, 7, 2, 8)
    return Case(given.program, *(part.to(dtype) for part in given[1:4]), given.upstream)


CASES: dict[str, Case] = {
    **{"-".join(map(str, size)): case(*size) for size in SIZES},
    **{f"holes-{name}": holes(name) for name in CIRCUITS},
    **{f"one-hot-{name}": one_hot(name) for name in CIRCUITS},
    **{f"flat-{name}": flat(name) for name in CIRCUITS},
    "wide-btree": case("btree", 7, 3, 2, 7, scale=30.0),
    "bfloat16": half(torch.bfloat16),
    "float16": half(torch.float16),
    "strided": strided(case("btree", 8, 7, 3, 8)),
    "no circuits": case("btree", 5, 2, 0, 5),
}
