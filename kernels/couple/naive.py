"""Acceptance of drafts by comparison, in plain PyTorch: the definition that the kernel is checked against."""

from __future__ import annotations

import torch
from torch import Tensor

Others = tuple[Tensor, Tensor, Tensor]  # is_coupled [R] bool; kept [R, width] int64 and count [R] int32 of the others


def accept(
    tokens: Tensor, drafts: Tensor, cu_num_logits: Tensor, width: int, others: Others | None = None
) -> tuple[Tensor, Tensor]:
    """Return the accepted tokens [R, width] int64, -1 after the last, and their number [R] int32 (README.md).

    tokens, drafts: [T], the token sampled at every row, and its input token.
    cu_num_logits: [R + 1]; request r has the rows cu_num_logits[r] .. cu_num_logits[r + 1] - 1, at most `width`.
    others: results of other requests, overwritten for the coupled ones and returned; None: all are coupled.
    """
    columns = torch.arange(width, device=tokens.device)
    first = cu_num_logits[:-1, None].long()  # [R, 1]
    rows = cu_num_logits[1:, None].long() - first  # [R, 1]
    at = (first + columns).clamp(max=tokens.shape[0] - 1)  # [R, width]
    picked = tokens[at]
    following = drafts[(at + 1).clamp(max=tokens.shape[0] - 1)]
    accepted = (following == picked).long().cumprod(dim=1).sum(dim=1)
    num_kept = torch.minimum(accepted + 1, rows[:, 0])  # the row after a request's last is another's
    picked, num_kept = torch.where(columns < num_kept[:, None], picked, -1), num_kept.int()
    if others is None:
        return picked, num_kept
    is_coupled, kept, count = others
    kept.copy_(torch.where(is_coupled[:, None], picked, kept))
    count.copy_(torch.where(is_coupled, num_kept, count))
    return kept, count
