"""CP, a mixture of fully factorised distributions: q(x) = sum_z w[z] prod_k q(x_k | z) (MtPC paper, section 3)."""

from __future__ import annotations

from functools import cached_property

from vllm_mtpc.circuits.base import Circuit, Latents
from vllm_mtpc.kernels.filter import Instruction, Op, Program


class CP(Circuit):
    """One latent for the whole window."""

    name = "cp"

    @cached_property
    def latents(self) -> Latents:
        return Latents(parents=(), reads=(0,) * self.window)

    @cached_property
    def program(self) -> Program:
        return [[], *[[Instruction(Op.CONDITION)]] * (self.window - 1), []]
