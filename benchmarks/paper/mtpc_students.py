"""HMMs that no head folder asks for: what Appendix E of the MtPC paper compares its choice with.

All are heads of the package, held where they should be while they learn, and are measured as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from vllm_mtpc.heads.head import Head
from vllm_mtpc.train.circuit_trainer import CircuitTrainer
from vllm_mtpc.train.options import TrainOptions


def _non_contextual(head: Head) -> None:
    """Transitions that do not depend on the text: the bias alone."""
    head.inner_weight.data.zero_()
    head.inner_weight.requires_grad_(False)


def _homogeneous(head: Head) -> None:
    """One transition for all positions: equal at the start, and the mean of the gradients for each."""
    for parameter in (head.inner_weight, head.inner_bias):
        parameter.data.copy_(parameter.data[:1].expand_as(parameter))
        parameter.register_hook(lambda gradient: gradient.mean(0, keepdim=True).expand_as(gradient).contiguous())


def _uniform(head: Head) -> None:
    """Transitions that start without preferring the same latent."""
    torch.nn.init.zeros_(head.inner_bias)


def _kind(prepare: Callable[[Head], None]) -> type[TrainOptions]:
    class Prepared(CircuitTrainer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self.prepare(self.head)

    Prepared.prepare = staticmethod(prepare)

    class Options(TrainOptions):
        trainer: ClassVar[type[CircuitTrainer]] = Prepared

    return Options


HMMS: dict[str, type[TrainOptions]] = {
    "contextual, inhomogeneous, identity": TrainOptions,
    "not contextual": _kind(_non_contextual),
    "homogeneous": _kind(_homogeneous),
    "uniform start": _kind(_uniform),
}
