"""Drafts of a circuit in plain PyTorch: the definition that the kernel is checked against, and the CPU's path."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_mtpc.kernels.filter.naive import advance
from vllm_mtpc.kernels.filter.program import Program

Pick = Callable[[Tensor, int], Tensor]  # (log q [B, V] float32, which draft) -> tokens [B]


def draft(
    program: Program, evidence: Tensor, leaf_logits: Tensor, root_logits: Tensor, inner_logits: Tensor, pick: Pick
) -> Tensor:
    """Tokens [B, K] int64 of positions 1 .. K of the window, one after the other, each picked from log q(. | before).

    evidence [B, r]: log p(x_0 | z) of the verifier's token, normalised; leaf_logits [B, K, r, V], root_logits [B, r]
    and inner_logits [B, F, r, r] are not normalised. All arithmetic is float32.
    """
    inner = inner_logits.float().log_softmax(dim=-1)
    weights, stack = advance(program[0], root_logits.float().log_softmax(dim=-1), (), evidence, inner)
    weights, stack = advance(program[1], weights, stack, evidence, inner)
    columns = []
    for k in range(leaf_logits.shape[1]):
        leaf = leaf_logits[:, k].float().log_softmax(dim=-1)  # [B, r, V]
        columns.append(pick(torch.logsumexp(weights.unsqueeze(-1) + leaf, dim=1), k))
        if k + 1 < leaf_logits.shape[1]:
            index = columns[-1].view(-1, 1, 1).expand(-1, leaf.shape[1], 1)
            weights, stack = advance(program[k + 2], weights, stack, leaf.gather(2, index)[..., 0], inner)
    return torch.stack(columns, dim=1)
