"""What a circuit knows of its latents, token by token; see README.md here."""

from __future__ import annotations

from vllm_mtpc.kernels.filter.program import Instruction, Op, Program

__all__ = ["Instruction", "Op", "Program"]
