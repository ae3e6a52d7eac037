"""CP, a mixture of fully factorised distributions: q(x) = sum_z w[z] prod_k q(x_k | z) (MtPC paper, section 3)."""

from __future__ import annotations

from torch import Tensor

from vllm_mtpc.circuits.base import Circuit, CircuitParams, FilterState, Reduce


class CP(Circuit):
    name = "cp"

    @property
    def num_inner(self) -> int:
        return 0

    def advance(self, params: CircuitParams, state: FilterState, k: int, evidence: Tensor) -> FilterState:
        return FilterState((state.weights + evidence).log_softmax(dim=-1))

    def joint(self, params: CircuitParams, evidence: Tensor, reduce: Reduce) -> Tensor:
        return reduce(params.root + evidence.sum(dim=1), -1)
