"""The path of one launch: `draft_rows`, and for drafts within a support `clear_rows` before it (README.md).

A leaf has columns [0, V), its tokens; within a support (`kernels/support.py`) M of them, whose tokens are given.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_mtpc.kernels.draft import bigram, launches
from vllm_mtpc.kernels.filter import kernel as machine


@triton.jit
def tokens_at(support_ptr, column, num_columns):
    """Tokens of columns [BLOCK]."""
    if support_ptr is None:
        token = column
    else:
        token = tl.load(support_ptr + column, mask=column < num_columns, other=0).to(tl.int32)
    return token


@triton.jit
def load_conditioned(
    leaf_ptr,
    z_stride,
    support_ptr,
    source_ptr,
    target_ptr,
    target_stride,
    column,
    num_columns,
    r,
    R: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A tile, with what the token before adds to its columns; RANK 0: nothing."""
    tile = launches.load_tile(leaf_ptr, z_stride, column, num_columns, r, R)
    if RANK > 0:
        token = tokens_at(support_ptr, column, num_columns)
        bias = bigram.block_bias(source_ptr, target_ptr, target_stride, token, column < num_columns, RANK, CHUNK)
        tile += bias[None, :]
    return tile


@triton.jit(
    do_not_specialize=["leaf_stride", "k_stride", "z_stride", "num_drafts", "num_inner"],
    do_not_specialize_on_alignment=["slot_ptr", "pos_ptr", "token_ptr", "confidence_ptr", "first_ptr"],
)
def draft_rows(
    leaf_ptr,
    leaf_stride,
    k_stride,
    z_stride,
    first_ptr,
    source_ptr,
    target_ptr,
    target_k_stride,
    target_stride,
    support_ptr,
    evidence_ptr,
    root_ptr,
    inner_ptr,
    program_ptr,
    slot_ptr,
    temperature_ptr,
    seed_ptr,
    pos_ptr,
    token_ptr,
    token_stride,
    confidence_ptr,
    confidence_stride,
    cache_ptr,
    cache_stride,
    cache_k_stride,
    num_drafts,
    num_inner,
    r,
    num_columns,
    NOISED_ARGMAX: tl.constexpr,
    DRAW: tl.constexpr,
    USE_FP64: tl.constexpr,
    R: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNIT: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """All drafts of one request; a leaf of one block is read once and stays in registers.

    RANK: of what the token before adds to the logits; 0: nothing, and there is none of its tensors.
    support_ptr, where it is not None: the tokens of the columns [B, K, M].
    """
    row = tl.program_id(0).to(tl.int64)
    slot, temperature, scale, seed, pos = launches.request(slot_ptr, temperature_ptr, seed_ptr, pos_ptr, row, DRAW)
    inner_ptr += row * num_inner * r * r
    weights, stack = launches.start(evidence_ptr, root_ptr, inner_ptr, program_ptr, row, r, R, DEPTH)
    leaf_ptr += row * leaf_stride * UNIT
    z_stride *= UNIT
    in_block = tl.arange(0, BLOCK)
    if RANK > 0:
        before = tl.load(first_ptr + row).to(tl.int64)
    for k in range(num_drafts):
        leaf = leaf_ptr + k * k_stride * UNIT
        source, target, support = source_ptr, target_ptr, support_ptr
        if RANK > 0:
            source += before * RANK
            target += target_k_stride.to(tl.int64) * k
        if support_ptr is not None:
            support += (row * num_drafts + k) * num_columns
        top = tl.full([R], float("-inf"), tl.float32)
        total = tl.full([R], 0.0, tl.float32)
        if BLOCKS == 1:
            tile = load_conditioned(
                leaf, z_stride, support, source, target, target_stride, in_block, num_columns, r, R, RANK, CHUNK
            )
            top, total = launches.add_block(tile, top, total)
        else:
            for block in range(BLOCKS):
                column = block * BLOCK + in_block
                logits = load_conditioned(
                    leaf, z_stride, support, source, target, target_stride, column, num_columns, r, R, RANK, CHUNK
                )
                top, total = launches.add_block(logits, top, total)
        norm = machine.finite(top) + tl.log(total)

        largest = tl.full([], float("-inf"), tl.float64 if USE_FP64 else tl.float32)
        chosen = tl.full([], 0, tl.int64)
        q_top = tl.full([], float("-inf"), tl.float32)
        first = tl.full([], 0.0, tl.float32)
        second = tl.full([], 0.0, tl.float32)
        for block in range(BLOCKS):
            column = block * BLOCK + in_block
            if BLOCKS > 1:
                tile = load_conditioned(
                    leaf, z_stride, support, source, target, target_stride, column, num_columns, r, R, RANK, CHUNK
                )
            log_q = launches.mixture(tile, weights, norm)
            token, mask = tokens_at(support, column, num_columns), column < num_columns
            if cache_ptr is not None:
                log_q = launches.rounded(log_q, cache_ptr)
                cached = cache_ptr + slot * cache_stride + k * cache_k_stride
                tl.store(cached + token, log_q, mask=mask & (slot >= 0))
            q_top, first, second = launches.add_moments(log_q, scale, q_top, first, second)
            value, index = NOISED_ARGMAX(
                log_q, token, mask, seed, pos + k, temperature, IS_DRAFTING=False, USE_FP64=USE_FP64
            )
            is_better = value > largest
            largest = tl.where(is_better, value, largest)
            chosen = tl.where(is_better, (block * BLOCK + index).to(tl.int64), chosen)

        drafted = chosen if support_ptr is None else tl.load(support + chosen)
        tl.store(token_ptr + row * token_stride + k, drafted)
        tl.store(confidence_ptr + row * confidence_stride + k, launches.confidence(first, second, temperature, DRAW))
        if k + 1 < num_drafts:
            message = launches.evidence(leaf, z_stride, chosen, norm, r, R)
            if RANK > 0:
                before = drafted
            weights, stack = machine.advance(program_ptr, k + 2, weights, stack, message, inner_ptr, r, R, DEPTH)


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])
def clear_rows(slot_ptr, cache_ptr, cache_stride, cache_k_stride, vocab_size, BLOCK: tl.constexpr):
    """-inf, one block of one draft's conditional: what is not in its support."""
    block, k, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    slot, token = tl.load(slot_ptr + row).to(tl.int64), block * BLOCK + tl.arange(0, BLOCK)
    nothing = tl.full([BLOCK], float("-inf"), tl.float32).to(cache_ptr.dtype.element_ty)
    cached = cache_ptr + slot * cache_stride + k * cache_k_stride
    tl.store(cached + token, nothing, mask=(token < vocab_size) & (slot >= 0))
