"""Runs the filter kernel and its backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.interpreted import launch, moved, poisoned
from vllm_mtpc.circuits import CIRCUITS, base, circuit_class, conditionals
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.kernels.filter import Program
from vllm_mtpc.train.losses import step_loss
from vllm_mtpc.train.options import TrainOptions


class Case(NamedTuple):
    program: Program
    evidence: Tensor  # [B, m, r]
    root: Tensor  # [B, r]
    inner: Tensor  # [B, F, r, r]
    upstream: Tensor  # [B, m, r], gradient of the weights


Filter = Callable[[Program, Tensor, Tensor, Tensor], Tensor]
Outcome = tuple[Tensor, Tensor, Tensor, Tensor]  # weights, gradients of evidence, root and inner


def run(cases: dict[str, Case]) -> dict:
    """Return the Outcome of each case; "again": of the first one run twice; "alone": its circuit 1 without the others;
    "trained": see `training_gradients`."""
    return launch(launch_all, cases)


def training_gradients(name: str, filter_weights: Filter | None = None, device: str = "cpu") -> list[Tensor]:
    """Loss and gradients of a tiny head in training, chunk by chunk; `filter_weights`: in place of the operation."""
    r, sizes = min(2, circuit_class(name).max_components), {"model_type": "llama", "vocab_size": 5, "hidden_size": 8}
    asked = {"target": "t", "data": ["d"], "out": "o", "circuit": name, "window": 5, "components": r}
    options = TrainOptions(**asked, beta=0.5, acceptance=0.3, chunk_windows=2)
    config = HeadConfig.create(circuit=name, window=5, num_components=r, target=sizes, verifier="../target")
    torch.manual_seed(0)
    head = build_head(config).to(device)
    hidden, distribution = torch.randn(3, 8).to(device), torch.randn(3, 5, 5).log_softmax(-1).to(device)
    tokens = torch.tensor([[0, 2, 1, 1, 4], [2, 0, 0, 3, -1], [1, 1, -1, -1, -1]], device=device)
    kept = base.filter_weights, conditionals.filter_weights
    base.filter_weights = conditionals.filter_weights = filter_weights or kept[0]
    try:
        loss = step_loss(
            head, lambda rows: hidden[rows], tokens, (tokens >= 0).sum(0), lambda rows: distribution[rows], options
        )
        loss = loss - head.circuit.conditional_log_probs(head(hidden), tokens).mean()
        loss.backward()
    finally:
        base.filter_weights, conditionals.filter_weights = kept
    return [loss.detach().cpu(), *(p.grad.cpu() for p in head.parameters())]


def launch_all(cases: dict[str, Case], device: str) -> dict:
    from vllm_mtpc.kernels.filter import kernel

    with poisoned():
        results: dict = {name: _outcome(kernel.filter_weights, case, device) for name, case in cases.items()}
        first = next(iter(cases.values()))
        results["again"] = _outcome(kernel.filter_weights, first, device)
        results["alone"] = _outcome(kernel.filter_weights, Case(first[0], *(part[1:2] for part in first[1:])), device)
        results["trained"] = {name: training_gradients(name, kernel.filter_weights, device) for name in CIRCUITS}
        return results


def _outcome(filter_weights: Filter, case: Case, device: str) -> Outcome:
    inputs = [moved(part, device).requires_grad_(True) for part in case[1:4]]
    with torch.no_grad():
        plain = filter_weights(case.program, *inputs)
    weights = filter_weights(case.program, *inputs)
    assert torch.equal(plain, weights), "the tape changed the weights"
    grads = torch.autograd.grad(weights, inputs, case.upstream.to(device))
    return tuple(part.detach().cpu().clone() for part in (weights, *grads))
