"""Inputs of the filter kernel, for its tests and for comparing interpreters; runs it and its backward on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.enumeration import CIRCUITS, make
from tests.support.interpreted import moved
from vllm_mtpc.circuits import base, circuit_class, conditionals
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.kernels.filter import Program, naive
from vllm_mtpc.train.losses import step_loss
from vllm_mtpc.train.options import TrainOptions

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


Filter = Callable[[Program, Tensor, Tensor, Tensor], Tensor]


def training_gradients(name: str, filter_weights: Filter = naive.filter_weights, device: str = "cpu") -> list[Tensor]:
    """Loss and gradients of a tiny head in training, chunk by chunk, with this filter."""
    r, sizes = min(2, circuit_class(name).max_components), {"model_type": "llama", "vocab_size": 5, "hidden_size": 8}
    asked = {"target": "t", "data": ["d"], "out": "o", "circuit": name, "window": 5, "components": r}
    options = TrainOptions(**asked, beta=0.5, acceptance=0.3, chunk_windows=2)
    config = HeadConfig.create(circuit=name, window=5, num_components=r, target=sizes, verifier="../target")
    torch.manual_seed(0)
    head = build_head(config).to(device)
    hidden, distribution = torch.randn(3, 8).to(device), torch.randn(3, 5, 5).log_softmax(-1).to(device)
    tokens = torch.tensor([[0, 2, 1, 1, 4], [2, 0, 0, 3, -1], [1, 1, -1, -1, -1]], device=device)
    known = (tokens >= 0).sum(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "filter_weights", filter_weights)
        patch.setattr(conditionals, "filter_weights", filter_weights)
        loss = step_loss(head, lambda rows: hidden[rows], tokens, known, lambda rows: distribution[rows], options)
        loss = loss - head.circuit.conditional_log_probs(head(hidden), tokens).mean()
        loss.backward()
    return [loss.detach().cpu(), *(p.grad.cpu() for p in head.parameters())]


def launch_all(cases: dict[str, Case], device: str) -> dict:
    """Return weights and gradients of evidence, root and inner of each case; "again": of the first one run twice;
    "alone": of its circuit 1 without the others; "trained": see `training_gradients`."""
    from vllm_mtpc.kernels.filter.kernel import filter_weights

    first = next(iter(cases.values()))
    others = {"again": first, "alone": Case(first[0], *(part[1:2] for part in first[1:]))}
    results: dict = {name: _outcome(filter_weights, case, device) for name, case in {**cases, **others}.items()}
    return results | {"trained": {name: training_gradients(name, filter_weights, device) for name in CIRCUITS}}


def _outcome(filter_weights: Filter, case: Case, device: str) -> tuple[Tensor, ...]:
    inputs = [moved(part, device).requires_grad_(True) for part in case[1:4]]
    with torch.no_grad():
        plain = filter_weights(case.program, *inputs)
    weights = filter_weights(case.program, *inputs)
    assert torch.equal(plain, weights), "the tape changed the weights"
    grads = torch.autograd.grad(weights, inputs, case.upstream.to(device))
    return tuple(part.detach().cpu().clone() for part in (weights, *grads))
