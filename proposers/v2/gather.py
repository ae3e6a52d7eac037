"""Triton kernels that gather the inputs of a draft: one launch each, no synchronisation with the host."""

from __future__ import annotations

from torch import Tensor
from vllm.triton_utils import tl, triton
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
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


def gather_last_rows(
    input_batch: InputBatch,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    rows: Tensor,
    first: Tensor,
    pos: Tensor,
) -> None:
    """Fill `rows`, `first` and `pos` for the R requests of a batch.

    Args:
        num_sampled, num_rejected: [R]; 0 sampled tokens where a prompt is not read to its end.
        last_sampled: [max_num_reqs, 1], by request slot.
        next_prefill_tokens: [lookahead, max_num_reqs].
        rows: [R or more], int64, the row of each request's last accepted token in the batch.
        first: [R or more], int64, the token after it: the target's own, or the next one of an unfinished prompt.
        pos: [R or more], int64, the position of that token.
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


@triton.jit
def _query_rows(
    slot_ptr,
    row_ptr,
    read_ptr,
    table_ptr,
    table_stride,
    positions_ptr,
    slots_ptr,
    ends_ptr,
    block_size,
    max_len,
    queries,
    PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    is_real = tl.load(slot_ptr + request) >= 0
    row = tl.load(row_ptr + request, mask=is_real, other=0)
    start = tl.load(read_ptr + row, mask=is_real, other=-1).to(tl.int64) + 1
    query = tl.arange(0, BLOCK)
    at, is_query = start + query, query < queries
    is_kept = is_query & is_real & (at < max_len)
    block = tl.load(table_ptr + request * table_stride + at // block_size, mask=is_kept, other=0).to(tl.int64)
    slot = tl.where(is_kept & (block > 0), block * block_size + at % block_size, PAD)
    tl.store(positions_ptr + request * queries + query, tl.minimum(at, max_len - 1), mask=is_query)
    tl.store(slots_ptr + request * queries + query, slot, mask=is_query)
    tl.store(ends_ptr + request, tl.minimum(start + queries, max_len).to(tl.int32))


def place_query_rows(
    slots: Tensor,
    last_rows: Tensor,
    target_positions: Tensor,
    block_table: Tensor,
    block_size: int,
    max_len: int,
    num_queries: int,
    row_positions: Tensor,
    row_slots: Tensor,
    ends: Tensor,
) -> None:
    """Place the queries of R requests after each request's last row; queries beyond `max_len` have no KV slot.

    Args:
        slots: [R], request slots in vLLM's states; -1: padding, whose rows are not read and have no KV slot.
        last_rows: [R], of `gather_last_rows`.
        target_positions: positions of the target's rows.
        block_table: [R, blocks].
        row_positions, row_slots: [R * num_queries], int64, filled with positions and KV slots.
        ends: [R], int32, filled with the length of each text and its queries.
    """
    _query_rows[(len(slots),)](
        slots,
        last_rows,
        target_positions,
        block_table,
        block_table.stride(0),
        row_positions,
        row_slots,
        ends,
        block_size,
        max_len,
        num_queries,
        PAD=PAD_SLOT_ID,
        BLOCK=triton.next_power_of_2(num_queries),
    )
