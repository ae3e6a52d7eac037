"""Drafts of a circuit in plain PyTorch: the definition that the kernel is checked against, used on CPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_mtpc.kernels.filter import Program, advance
from vllm_mtpc.kernels.leaf import Bigram, LowRank, evidence_of

Pick = Callable[[Tensor, int], Tensor]  # (log q [B, V] float32, index of the draft) -> tokens [B]


def draft(
    program: Program,
    evidence: Tensor | None,
    leaf_logits: Tensor,
    root_logits: Tensor,
    inner_logits: Tensor,
    first: Tensor | None = None,
    bigram: Bigram | None = None,
    low: LowRank | None = None,
    *,
    pick: Pick,
    dtype: torch.dtype = torch.float32,
    ids: Tensor | None = None,
) -> Tensor:
    """Draft K tokens [B, K] int64, each picked from log q(. | tokens before); float32 arithmetic.

    Other arguments are those of README.md. With `ids` [Vd] `pick` returns columns of log q [B, Vd].
    dtype: log q is rounded to it before a token is picked, since it is stored and scored in that dtype.
    """
    if low is not None:
        leaf_logits = LowRank(low.low.float(), low.out.float()).leaves(leaf_logits.float())
    if evidence is None:
        evidence, leaf_logits = evidence_of(leaf_logits[:, 0], first), leaf_logits[:, 1:]
    inner = inner_logits.float().log_softmax(dim=-1)
    weights, stack = advance(program[0], root_logits.float().log_softmax(dim=-1), (), evidence, inner)
    weights, stack = advance(program[1], weights, stack, evidence, inner)
    tokens: list[Tensor] = []
    for k in range(leaf_logits.shape[1]):
        leaf = leaf_logits[:, k].float()  # [B, r, V]
        if bigram is not None:
            leaf = leaf + bigram.bias(k, tokens[-1] if k else first)[:, None]
        leaf = leaf.log_softmax(dim=-1)
        log_q = torch.logsumexp(weights.unsqueeze(-1) + leaf, dim=1).to(dtype)
        column = pick(log_q.float(), k)
        tokens.append(column if ids is None else ids[column])
        if k + 1 < leaf_logits.shape[1]:
            evidence = leaf.gather(2, column.view(-1, 1, 1).expand(-1, leaf.shape[1], 1))[..., 0]
            weights, stack = advance(program[k + 2], weights, stack, evidence, inner)
    return torch.stack(tokens, dim=1)
