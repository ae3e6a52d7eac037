"""Acceptance of drafts by comparison, in plain PyTorch: the definition that the kernel is checked against."""

from __future__ import annotations

import torch
from torch import Tensor


def accept(tokens: Tensor, drafts: Tensor, cu_num_logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Kept tokens [R, width] int64 (-1 behind the last) and their number [R] int32.

    tokens [T] int64: what is picked at every row; drafts [T]: the rows' input tokens. Request r owns the rows
    cu_num_logits[r] .. cu_num_logits[r + 1] - 1, at most `width`; row j's token is kept while every token before it
    equals the input of the row behind.
    """
    columns = torch.arange(width, device=tokens.device)
    first = cu_num_logits[:-1, None].long()  # [R, 1]
    rows = cu_num_logits[1:, None].long() - first  # [R, 1]
    at = (first + columns).clamp(max=tokens.shape[0] - 1)  # [R, width]
    picked = tokens[at]
    following = drafts[(at + 1).clamp(max=tokens.shape[0] - 1)]
    accepted = (following == picked).long().cumprod(dim=1).sum(dim=1)
    num_kept = torch.minimum(accepted + 1, rows[:, 0])  # what follows a request's last row is not its own
    return torch.where(columns < num_kept[:, None], picked, -1), num_kept.int()
