"""CP, a mixture of fully factorised distributions: q(x) = sum_z w[z] prod_k q(x_k | z) (MtPC paper, section 3)."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from vllm_mtpc.circuits.base import Circuit, CircuitParams, Reduce
from vllm_mtpc.kernels.filter import Instruction, Op, Program


class CP(Circuit):
    name = "cp"

    @property
    def num_inner(self) -> int:
        return 0

    @cached_property
    def program(self) -> Program:
        return [[], *[[Instruction(Op.FOLD)]] * (self.window - 1), []]

    def joint(self, params: CircuitParams, evidence: Tensor, reduce: Reduce) -> Tensor:
        return reduce(params.root + evidence.sum(dim=1), -1)
