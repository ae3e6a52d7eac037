"""The distribution of a circuit's latents, token by token; see README.md here."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_mtpc.kernels.filter import naive
from vllm_mtpc.kernels.filter.program import Instruction, Op, Program, check_program

__all__ = ["Instruction", "Op", "Program", "check_program", "filter_weights"]

MAX_COMPONENTS = 128  # of a circuit: kernels have an r x r sum in registers
MAX_TRAINED = 64  # of the backward kernel, whose gradients of 128 x 128 would spill


def filter_weights(program: Program, evidence: Tensor, root_logits: Tensor, inner_logits: Tensor) -> Tensor:
    """Return log pi [B, m, r] float32 as `naive.filter_weights`; on a GPU by Triton if r and dtypes allow.

    Args:
        program: of the circuit.
        evidence: [B, m, r], log p(x_k | z).
        root_logits: [B, r].
        inner_logits: [B, F, r, r]; differentiable once in the three tensors; float64 inputs give float64.
    """
    is_double = torch.float64 in (evidence.dtype, root_logits.dtype, inner_logits.dtype)
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in (evidence, root_logits, inner_logits))
    largest = MAX_TRAINED if is_trained else MAX_COMPONENTS
    if not evidence.is_cuda or is_double or evidence.shape[-1] > largest:
        return naive.filter_weights(program, evidence, root_logits, inner_logits)
    from vllm_mtpc.kernels.filter import kernel  # importing it imports triton

    return kernel.filter_weights(program, evidence, root_logits, inner_logits)
