"""Triton kernels that gather the inputs of a draft: one launch each, no synchronisation with the host."""

from __future__ import annotations

from vllm.triton_utils import tl, triton


@triton.jit
def gather_last_rows(
    ends_ptr, rejected_ptr, sampled_ptr, slot_ptr,
    last_sampled_ptr, last_sampled_stride, next_prefill_ptr, next_prefill_stride,
    positions_ptr, row_ptr, first_ptr, pos_ptr,
):  # fmt: skip
    """Store row, first token and its position, each [R], int64 (`HeadSpeculator`), of the R requests of a batch.

    ends, rejected, sampled, slot: [R], end of a request's rows, rejected drafts, tokens, slot in vLLM's states.
    last_sampled, next_prefill: the target's token by slot, and that of an unfinished prompt; positions: of the rows.
    """
    request = tl.program_id(0)
    row = (tl.load(ends_ptr + request) - tl.load(rejected_ptr + request) - 1).to(tl.int64)
    slot = tl.load(slot_ptr + request).to(tl.int64)
    chosen = tl.load(last_sampled_ptr + slot * last_sampled_stride).to(tl.int64)
    given = tl.load(next_prefill_ptr + slot * next_prefill_stride).to(tl.int64)
    tl.store(row_ptr + request, row)
    tl.store(first_ptr + request, tl.where(tl.load(sampled_ptr + request) > 0, chosen, given))
    tl.store(pos_ptr + request, tl.load(positions_ptr + row).to(tl.int64) + 1)


@triton.jit
def place_query_rows(
    slot_ptr, row_ptr, read_ptr, table_ptr, table_stride,
    positions_ptr, slots_ptr, ends_ptr,
    block_size, max_len, queries,
    PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Place the queries of R requests after each request's last row; queries beyond `max_len` have no KV slot.

    slot, row: [R], slot in vLLM's states, -1: padding, which is not read; row of `gather_last_rows`.
    read, table: positions of the target's rows; block tables [R, blocks].
    positions, slots, ends: filled; [R * queries], int64, of the queries; [R], int32, length of each text with them.
    """
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
