"""Triton kernels that gather the inputs of a draft: one launch each, no synchronisation with the host."""

from __future__ import annotations

from vllm.triton_utils import tl, triton


@triton.jit(do_not_specialize=["num_reqs", "num_real"])
def gather_inputs(
    ends_ptr, rejected_ptr, sampled_ptr, slot_ptr,
    last_sampled_ptr, last_sampled_stride, next_prefill_ptr, next_prefill_stride,
    positions_ptr, stream_ptr, temperature_ptr, seed_ptr, state_ptr, state_stride,
    to_row_ptr, to_first_ptr, to_pos_ptr, to_slot_ptr, to_temperature_ptr, to_seed_ptr, to_state_ptr,
    num_reqs, num_real, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill the buffers of `HeadSpeculator` for R = num_reqs requests; one program for each of [max_num_reqs].

    ends, rejected, sampled, slot: [R], end of a request's rows, rejected drafts, tokens, slot in vLLM's states.
    last_sampled, next_prefill: the target's token by slot, and that of an unfinished prompt; positions: of the rows.
    stream, temperature, seed: [max_num_reqs], by slot; stream is added to positions.
    state: [T, width], of the rows; copied in blocks where BLOCK > 0.
    num_real: R, or 0 in a dummy run; slots of requests from there on are -1.
    """
    request = tl.program_id(0)
    is_request = request < num_reqs
    slot = tl.load(slot_ptr + request, mask=is_request, other=0).to(tl.int64)
    tl.store(to_slot_ptr + request, tl.where(request < num_real, slot, -1).to(tl.int32))
    tl.store(to_temperature_ptr + request, tl.load(temperature_ptr + request))
    tl.store(to_seed_ptr + request, tl.load(seed_ptr + request))
    end = tl.load(ends_ptr + request, mask=is_request, other=1)
    row = (end - tl.load(rejected_ptr + request, mask=is_request, other=0) - 1).to(tl.int64)
    chosen = tl.load(last_sampled_ptr + slot * last_sampled_stride).to(tl.int64)
    given = tl.load(next_prefill_ptr + slot * next_prefill_stride).to(tl.int64)
    has_token = tl.load(sampled_ptr + request, mask=is_request, other=0) > 0
    position = tl.load(positions_ptr + row).to(tl.int64) + 1 + tl.load(stream_ptr + slot).to(tl.int64)
    tl.store(to_row_ptr + request, row, mask=is_request)
    tl.store(to_first_ptr + request, tl.where(has_token, chosen, given), mask=is_request)
    tl.store(to_pos_ptr + request, position, mask=is_request)
    if BLOCK > 0:
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            is_column = is_request & (column < width)
            state = tl.load(state_ptr + row * state_stride + column, mask=is_column)
            tl.store(to_state_ptr + request.to(tl.int64) * width + column, state, mask=is_column)


@triton.jit
def place_query_rows(
    slot_ptr, row_ptr, read_ptr, table_ptr, table_stride,
    positions_ptr, slots_ptr, ends_ptr,
    block_size, max_len, queries,
    PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Place the queries of R requests after each request's last row; queries beyond `max_len` have no KV slot.

    slot, row: [R], slot in vLLM's states, -1: padding, which is not read; row of `gather_inputs`.
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
