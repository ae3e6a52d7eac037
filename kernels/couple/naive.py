"""Acceptance of drafts by comparison, in plain PyTorch: the definition that the kernel is checked against."""

from __future__ import annotations

import torch
from torch import Tensor

Others = tuple[Tensor, Tensor, Tensor]  # is_coupled [R] bool; kept [R, width] int64 and count [R] int32 of the others


def accept(
    tokens: Tensor, drafts: Tensor, cu_num_logits: Tensor, width: int, others: Others | None = None
) -> tuple[Tensor, Tensor]:
    """Kept tokens [R, width] int64 (-1 behind the last) and their number [R] int32.

    tokens [T] int64: what is picked at every row; drafts [T]: the rows' input tokens. Request r owns the rows
    cu_num_logits[r] .. cu_num_logits[r + 1] - 1, at most `width`; row j's token is kept while every token before it
    equals the input of the row behind. others: requests that are not coupled, which keep what they have; kept and
    count are filled in place and handed back. None: every request is coupled.
    """
    columns = torch.arange(width, device=tokens.device)
    first = cu_num_logits[:-1, None].long()  # [R, 1]
    rows = cu_num_logits[1:, None].long() - first  # [R, 1]
    at = (first + columns).clamp(max=tokens.shape[0] - 1)  # [R, width]
    picked = tokens[at]
    following = drafts[(at + 1).clamp(max=tokens.shape[0] - 1)]
    accepted = (following == picked).long().cumprod(dim=1).sum(dim=1)
    num_kept = torch.minimum(accepted + 1, rows[:, 0])  # what follows a request's last row is not its own
    picked, num_kept = torch.where(columns < num_kept[:, None], picked, -1), num_kept.int()
    if others is None:
        return picked, num_kept
    is_coupled, kept, count = others
    kept.copy_(torch.where(is_coupled[:, None], picked, kept))
    count.copy_(torch.where(is_coupled, num_kept, count))
    return kept, count
