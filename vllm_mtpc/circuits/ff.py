"""Fully factorised: q(x) = prod_k q(x_k). No dependence between tokens; one component."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from vllm_mtpc.circuits.base import Circuit, CircuitParams, Reduce
from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.kernels.filter import Program


class FullyFactorised(Circuit):
    name = "ff"

    def __init__(self, window: int, num_components: int) -> None:
        super().__init__(window, num_components)
        if num_components != 1:
            raise HeadConfigError(f"circuit 'ff' with num_components={num_components}: it has exactly 1; use 'cp'")

    @property
    def num_inner(self) -> int:
        return 0

    @property
    def has_root(self) -> bool:
        return False

    @cached_property
    def program(self) -> Program:
        return [[]] * (self.window + 1)

    def joint(self, params: CircuitParams, evidence: Tensor, reduce: Reduce) -> Tensor:
        return evidence.sum(dim=1)[:, 0]
