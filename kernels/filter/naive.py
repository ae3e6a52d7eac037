"""The machine of `program.py` in plain PyTorch: the definition that kernels are checked against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_mtpc.kernels.filter.program import Instruction, Op, Program
from vllm_mtpc.kernels.leaf import full


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

    log q(x_k | x_<k) = logsumexp_z(log pi[k, z] + evidence[k, z]). Half precisions are read as float32. Arguments as in
    `kernels.filter.filter_weights`, 1 <= m <= n; evidence of 0 marginalises a token.
    """
    inner = full(inner_logits).log_softmax(dim=-1)
    weights, stack = full(root_logits).log_softmax(dim=-1), ()
    columns = []
    for k in range(evidence.shape[1]):
        message = full(evidence[:, k - 1]) if k else weights  # the first list reads none
        weights, stack = advance(program[k], weights, stack, message, inner)
        columns.append(weights)
    return torch.stack(columns, dim=1)
