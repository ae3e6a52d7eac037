"""Where a draft begins: each request's last accepted row, the token the target chose there, and its position."""

from __future__ import annotations

from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.input_batch import InputBatch


@triton.jit
def _last_rows(
    ends_ptr,
    rejected_ptr,
    sampled_ptr,
    slot_ptr,
    last_sampled_ptr,
    last_sampled_stride,
    next_prefill_ptr,
    next_prefill_stride,
    positions_ptr,
    row_ptr,
    first_ptr,
    pos_ptr,
):
    request = tl.program_id(0)
    row = (tl.load(ends_ptr + request) - tl.load(rejected_ptr + request) - 1).to(tl.int64)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    chosen = tl.load(last_sampled_ptr + slot * last_sampled_stride).to(tl.int64)
    given = tl.load(next_prefill_ptr + slot * next_prefill_stride).to(tl.int64)
    tl.store(row_ptr + request, row)
    tl.store(first_ptr + request, tl.where(tl.load(sampled_ptr + request) > 0, chosen, given))
    tl.store(pos_ptr + request, tl.load(positions_ptr + row).to(tl.int64) + 1)


def last_rows(
    input_batch: InputBatch,
    num_sampled: Tensor,  # [R], 0: the prompt is not read to its end
    num_rejected: Tensor,  # [R]
    last_sampled: Tensor,  # [max_num_reqs, 1]
    next_prefill_tokens: Tensor,  # [lookahead, max_num_reqs]
    rows: Tensor,
    first: Tensor,
    pos: Tensor,
) -> None:
    """Fills rows, first and pos, [R] int64: a request's last accepted row, the token behind it, that token's position.

    The token is the target's own, or the next of a prompt that is not read to its end. One launch, no host sync.
    """
    _last_rows[(input_batch.num_reqs,)](
        input_batch.query_start_loc[1:],
        num_rejected,
        num_sampled,
        input_batch.idx_mapping,
        last_sampled,
        last_sampled.stride(0),
        next_prefill_tokens,
        next_prefill_tokens.stride(1),
        input_batch.positions,
        rows,
        first,
        pos,
    )
