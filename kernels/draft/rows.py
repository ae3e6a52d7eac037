"""All drafts of a request in one program instance: leaves that are small."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_mtpc.kernels.draft import parts
from vllm_mtpc.kernels.filter import machine


@triton.jit(
    do_not_specialize=["leaf_stride", "k_stride", "z_stride", "num_drafts", "num_inner"],
    do_not_specialize_on_alignment=["slot_ptr", "pos_ptr", "token_ptr", "confidence_ptr"],
)
def draft_rows(
    evidence_ptr,
    leaf_ptr,
    leaf_stride,
    k_stride,
    z_stride,
    root_ptr,
    inner_ptr,
    code_ptr,
    begins_ptr,
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
    vocab_size,
    NOISED_ARGMAX: tl.constexpr,
    DRAW: tl.constexpr,
    USE_FP64: tl.constexpr,
    R: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """All drafts of one request; a leaf of one block is read once and stays in registers."""
    row = tl.program_id(0).to(tl.int64)
    slot, temperature, scale, seed, pos = parts.request(slot_ptr, temperature_ptr, seed_ptr, pos_ptr, row, DRAW)
    weights, stack, depth = parts.start(
        evidence_ptr, root_ptr, inner_ptr, code_ptr, begins_ptr, row, num_inner, r, R, DEPTH
    )
    leaf_ptr += row * leaf_stride * UNIT
    z_stride *= UNIT
    in_block = tl.arange(0, BLOCK)
    for k in range(num_drafts):
        leaf = leaf_ptr + k * k_stride * UNIT
        top = tl.full([R], float("-inf"), tl.float32)
        total = tl.full([R], 0.0, tl.float32)
        if BLOCKS == 1:
            tile = parts.tile(leaf, z_stride, in_block, vocab_size, r, R)
            top, total = parts.add_block(tile, top, total)
        else:
            for block in range(BLOCKS):
                token = block * BLOCK + in_block
                top, total = parts.add_block(parts.tile(leaf, z_stride, token, vocab_size, r, R), top, total)
        norm = parts.finite(top) + tl.log(total)

        best = tl.full([], float("-inf"), tl.float64 if USE_FP64 else tl.float32)
        chosen = tl.full([], 0, tl.int64)
        q_top = tl.full([], float("-inf"), tl.float32)
        first = tl.full([], 0.0, tl.float32)
        second = tl.full([], 0.0, tl.float32)
        for block in range(BLOCKS):
            token = block * BLOCK + in_block
            if BLOCKS == 1:
                log_q = parts.mixture(tile, weights, norm)
            else:
                log_q = parts.mixture(parts.tile(leaf, z_stride, token, vocab_size, r, R), weights, norm)
            mask = token < vocab_size
            if cache_ptr is not None:
                log_q = parts.rounded(log_q, cache_ptr)
                cached = cache_ptr + slot * cache_stride + k * cache_k_stride
                tl.store(cached + token, log_q, mask=mask & (slot >= 0))
            q_top, first, second = parts.add_moments(log_q, scale, q_top, first, second)
            value, index = NOISED_ARGMAX(
                log_q, token, mask, seed, pos + k, temperature, IS_DRAFTING=False, USE_FP64=USE_FP64
            )
            is_better = value > best
            best = tl.where(is_better, value, best)
            chosen = tl.where(is_better, (block * BLOCK + index).to(tl.int64), chosen)

        tl.store(token_ptr + row * token_stride + k, chosen)
        confidence = parts.confidence(first, second, temperature, DRAW)
        tl.store(confidence_ptr + row * confidence_stride + k, confidence)
        if k + 1 < num_drafts:
            message = parts.evidence(leaf, z_stride, chosen, norm, r, R)
            inner = inner_ptr + row * num_inner * r * r
            weights, stack, depth = machine.advance(
                code_ptr, begins_ptr, k + 2, weights, stack, depth, message, inner, r, R, DEPTH
            )
