"""Drafts of a circuit from probabilities in place of logarithms, for CPUs, where the number of operations is the cost.

A sum over latents is one matrix product. Probabilities below TINY count as TINY, which `naive.draft` tells apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_mtpc.kernels.draft.naive import Pick
from vllm_mtpc.kernels.filter.program import Instruction, Op, Program
from vllm_mtpc.kernels.leaf import Bigram

TINY = torch.tensor(torch.finfo(torch.float32).tiny)


def draft(
    program: Program,
    evidence: Tensor,
    leaf_logits: Tensor,
    root_logits: Tensor,
    inner_logits: Tensor,
    first: Tensor | None = None,
    bigram: Bigram | None = None,
    *,
    pick: Pick,
    ids: Tensor | None = None,
) -> Tensor:
    """Draft K tokens [B, K] int64; arguments as in `naive.draft`."""
    inner = inner_logits.float().softmax(dim=-1).unbind(1)
    message = evidence.softmax(dim=-1)[:, None]  # [B, 1, r]
    weights, stack = _advance(program[0], root_logits.float().softmax(dim=-1)[:, None], [], message, inner)
    weights, stack = _advance(program[1], weights, stack, message, inner)
    leaves, tokens = leaf_logits.float().softmax(dim=-1).unbind(1), list[Tensor]()
    for k, leaf in enumerate(leaves):  # [B, r, V]
        if bigram is None:
            q = torch.baddbmm(TINY, weights, leaf)[:, 0]
        else:  # q(v) = sum_z w_z p_z(v) e(v) / sum_v' p_z(v') e(v')
            factors = bigram.bias(k, tokens[-1] if k else first).softmax(dim=-1)
            scale = torch.baddbmm(TINY, leaf, factors[..., None]).mT.reciprocal()  # [B, 1, r]
            q = torch.baddbmm(TINY, weights * scale, leaf)[:, 0] * factors
        column = pick(q.log(), k)
        tokens.append(column if ids is None else ids[column])
        if k + 1 < len(leaves):
            message = leaf.gather(2, column.view(-1, 1, 1).expand(-1, leaf.shape[1], 1)).mT
            message = message if bigram is None else message * scale
            weights, stack = _advance(program[k + 2], weights, stack, message, inner)
    return torch.stack(tokens, dim=1)


def _advance(
    instructions: Sequence[Instruction], weights: Tensor, stack: list[Tensor], message: Tensor, inner: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """`filter.advance` of probabilities [B, 1, r]; inner: [B, r, r] each. A factor of a message has no effect."""
    for op, index in instructions:
        if op == Op.CONDITION:
            weights = torch.addcmul(TINY, weights, message).log().softmax(dim=-1)  # cheaper than a sum and a quotient
        elif op == Op.TRANSITION:
            weights = torch.bmm(weights, inner[index])
        elif op == Op.PUSH:
            stack.append(weights)
        elif op == Op.UPWARD:
            message = torch.baddbmm(TINY, stack.pop() * message, inner[index].mT).log().softmax(dim=-1)
        else:
            weights = torch.addcmul(TINY, stack.pop(), message).log().softmax(dim=-1)
            stack.append(message)
    return weights, stack
