"""Fully factorised: q(x) = prod_k q(x_k). No dependence between tokens; one component."""

from __future__ import annotations

from functools import cached_property

from vllm_mtpc.circuits.base import Circuit, Latents
from vllm_mtpc.kernels.filter import Program


class FullyFactorised(Circuit):
    """No latents."""

    name = "ff"
    max_components = 1

    @cached_property
    def latents(self) -> Latents:
        return Latents(parents=(), reads=(0,) * self.window)

    @cached_property
    def program(self) -> Program:
        return [[]] * (self.window + 1)
