"""Acceptance of drafts that must equal the tokens sampled by the target; see README.md here."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_mtpc.kernels.couple import naive
from vllm_mtpc.kernels.couple.naive import Others


def accept(
    tokens: Tensor, drafts: Tensor, cu_num_logits: Tensor, width: int, others: Others | None = None
) -> tuple[Tensor, Tensor]:
    """Return `naive.accept`; on a GPU by the Triton kernel."""
    if not tokens.is_cuda:
        return naive.accept(tokens, drafts, cu_num_logits, width, others)
    from vllm_mtpc.kernels.couple import kernel  # importing it imports triton

    return kernel.accept(tokens, drafts, cu_num_logits, width, others)


def warm_up(width: int, device: torch.device) -> None:
    """Compile the kernel's variants for verification of `width` rows, before the first request."""
    whole, index = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, dtype=torch.int32, device=device)
    kept, count = accept(whole, index, index, width)  # one request without rows
    accept(whole, index, index, width, (count > 0, kept, count))
