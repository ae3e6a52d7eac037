"""Inhomogeneous hidden Markov model: one latent per token, inner[k] = log p(z_{k+1} | z_k) (MtPC paper, section 3)."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor

from vllm_mtpc.circuits.base import Circuit, CircuitParams, Reduce
from vllm_mtpc.kernels.filter import Instruction, Op, Program


class HMM(Circuit):
    name = "hmm"

    @property
    def num_inner(self) -> int:
        return self.window - 1  # in position order

    @cached_property
    def program(self) -> Program:
        return [[], *([Instruction(Op.FOLD), Instruction(Op.FALL, k)] for k in range(self.window - 1)), []]

    def joint(self, params: CircuitParams, evidence: Tensor, reduce: Reduce) -> Tensor:
        message = evidence[:, -1]
        for k in reversed(range(self.window - 1)):
            message = evidence[:, k] + reduce(params.inner[:, k] + message.unsqueeze(1), -1)
        return reduce(params.root + message, -1)
