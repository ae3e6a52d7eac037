"""The machine of `program.py` in plain PyTorch: for training and evaluation, and the definition of `kernel.advance`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_mtpc.kernels.filter.program import Instruction, Op, Program


def advance(
    instructions: Sequence[Instruction], weights: Tensor, stack: Sequence[Tensor], message: Tensor, inner: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return weights [B, r] and stack, [B, r] each, after one list of a program.

    message: [B, r], evidence of the last token; inner: [B, F, r, r], log-softmax.
    """
    stack = list(stack)
    for op, index in instructions:
        if op == Op.CONDITION:
            weights = (weights + message).log_softmax(dim=-1)
        elif op == Op.TRANSITION:
            weights = torch.logsumexp(weights.unsqueeze(-1) + inner[:, index], dim=1)
        elif op == Op.PUSH:
            stack.append(weights)
        elif op == Op.UPWARD:
            message = torch.logsumexp(inner[:, index] + (stack.pop() + message).unsqueeze(1), dim=-1)
        else:
            weights = (stack.pop() + message).log_softmax(dim=-1)
            stack.append(message)
    return weights, tuple(stack)


def filter_weights(program: Program, evidence: Tensor, root_logits: Tensor, inner_logits: Tensor) -> Tensor:
    """Return log pi: the distribution of the latent that token k reads, given the tokens before it.

    log q(x_k | x_<k) = logsumexp_z(log pi[k, z] + evidence[k, z]).

    Args:
        program: of the circuit.
        evidence: [B, m, r], 1 <= m <= n, log p(x_k | z); 0 marginalises a token.
        root_logits: [B, r], not normalised.
        inner_logits: [B, F, r, r], not normalised.

    Returns:
        [B, m, r], differentiable in the three tensors.
    """
    inner = inner_logits.log_softmax(dim=-1)
    weights, stack = root_logits.log_softmax(dim=-1), ()
    columns = []
    for k in range(evidence.shape[1]):
        message = evidence[:, k - 1] if k else weights  # the first list reads none
        weights, stack = advance(program[k], weights, stack, message, inner)
        columns.append(weights)
    return torch.stack(columns, dim=1)
