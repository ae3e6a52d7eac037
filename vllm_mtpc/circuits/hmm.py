"""Inhomogeneous hidden Markov model: one latent per token, inner[k] = log p(z_{k+1} | z_k) (MtPC paper, section 3)."""

from __future__ import annotations

from functools import cached_property

from vllm_mtpc.circuits.base import Circuit, Latents
from vllm_mtpc.kernels.filter import Instruction, Op, Program


class HMM(Circuit):
    """A chain of latents, one per token."""

    name = "hmm"

    @cached_property
    def latents(self) -> Latents:
        return Latents(parents=range(self.window - 1), reads=range(self.window))

    @cached_property
    def program(self) -> Program:
        return [[], *([Instruction(Op.CONDITION), Instruction(Op.TRANSITION, k)] for k in range(self.window - 1)), []]
