"""`naive.accept` in Triton: one launch, one program instance per request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mtpc.kernels.couple.naive import Others


@triton.jit(
    do_not_specialize_on_alignment=["token_ptr", "draft_ptr", "begins_ptr", "coupled_ptr", "kept_ptr", "count_ptr"]
)
def _accept_rows(
    token_ptr, draft_ptr, begins_ptr, coupled_ptr, kept_ptr, count_ptr, width, WIDTH: tl.constexpr, SOME: tl.constexpr
):
    request = tl.program_id(0).to(tl.int64)
    if SOME and tl.load(coupled_ptr + request) == 0:
        return
    first = tl.load(begins_ptr + request).to(tl.int64)
    rows = tl.load(begins_ptr + request + 1).to(tl.int64) - first
    column = tl.arange(0, WIDTH)
    has_next = (column < width) & (column + 1 < rows)
    picked = tl.load(token_ptr + first + column, mask=(column < width) & (column < rows), other=-1).to(tl.int64)
    following = tl.load(draft_ptr + first + column + 1, mask=has_next, other=-1).to(tl.int64)
    accepted = tl.min(tl.where(has_next & (following == picked), WIDTH, column), axis=0)
    num_kept = tl.minimum(accepted.to(tl.int64) + 1, rows)
    tl.store(kept_ptr + request * width + column, tl.where(column < num_kept, picked, -1), mask=column < width)
    tl.store(count_ptr + request, num_kept.to(tl.int32))


def accept(
    tokens: Tensor, drafts: Tensor, cu_num_logits: Tensor, width: int, others: Others | None = None
) -> tuple[Tensor, Tensor]:
    """Return `naive.accept`; the tensors of `others` are contiguous."""
    num_reqs = cu_num_logits.shape[0] - 1
    if others is None:
        kept = torch.empty(num_reqs, width, dtype=torch.int64, device=tokens.device)
        is_coupled = count = torch.empty(num_reqs, dtype=torch.int32, device=tokens.device)
    else:
        is_coupled, kept, count = others
    if num_reqs:
        _accept_rows[(num_reqs,)](
            token_ptr=tokens.contiguous(), draft_ptr=drafts.contiguous(), begins_ptr=cu_num_logits.contiguous(),
            coupled_ptr=is_coupled.int().contiguous(), kept_ptr=kept, count_ptr=count, width=width,
            WIDTH=triton.next_power_of_2(width + 1), SOME=others is not None, num_warps=1,  # + 1: a minimum exists
        )  # fmt: skip
    return kept, count
