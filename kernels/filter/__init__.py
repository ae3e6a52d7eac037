"""The distribution of a circuit's latents, token by token; see README.md here."""

from __future__ import annotations

from vllm_mtpc.kernels.filter.naive import advance, filter_weights
from vllm_mtpc.kernels.filter.program import Instruction, Op, Program, check_program

__all__ = ["MAX_COMPONENTS", "Instruction", "Op", "Program", "advance", "check_program", "filter_weights"]

MAX_COMPONENTS = 128  # of a circuit: the draft kernels have an r x r sum in registers
