"""Circuits whose latents form a chain: none (ff), one for the window (cp), one per token (hmm); MtPC paper, section 3.

ff   q(x) = prod_k q(x_k)
cp   q(x) = sum_z w[z] prod_k q(x_k | z), a mixture of fully factorised distributions
hmm  inhomogeneous hidden Markov model: inner[k] = log p(z_{k+1} | z_k)
"""

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


class FullyFactorised(CP):
    """No dependence between tokens: one component."""

    name = "ff"
    max_components = 1

    @cached_property
    def program(self) -> Program:
        return [[]] * (self.window + 1)


class HMM(Circuit):
    """A chain of latents, one per token."""

    name = "hmm"

    @cached_property
    def latents(self) -> Latents:
        return Latents(parents=range(self.window - 1), reads=range(self.window))

    @cached_property
    def program(self) -> Program:
        return [[], *([Instruction(Op.CONDITION), Instruction(Op.TRANSITION, k)] for k in range(self.window - 1)), []]
