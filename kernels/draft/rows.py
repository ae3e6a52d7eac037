"""The path of one launch: one program instance drafts all K tokens of a request (README.md)."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_mtpc.kernels.draft import bigram, launches
from vllm_mtpc.kernels.filter import kernel as machine


@triton.jit
def load_conditioned(
    leaf_ptr, z_stride, source_ptr, target_ptr, target_stride, token, vocab_size, r,
    R: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A tile, with the bias of the token before; RANK 0: none."""
    tile = launches.load_tile(leaf_ptr, z_stride, token, vocab_size, r, R)
    if RANK > 0:
        bias = bigram.block_bias(source_ptr, target_ptr, target_stride, token, token < vocab_size, RANK, CHUNK)
        tile += bias[None, :]
    return tile


@triton.jit(
    do_not_specialize=["leaf_stride", "k_stride", "z_stride", "num_drafts", "num_inner"],
    do_not_specialize_on_alignment=["slot_ptr", "pos_ptr", "token_ptr", "confidence_ptr", "first_ptr"],
)
def draft_rows(
    leaf_ptr, leaf_stride, k_stride, z_stride,
    first_ptr, source_ptr, target_ptr, target_k_stride, target_stride,
    evidence_ptr, root_ptr, inner_ptr, program_ptr,
    slot_ptr, temperature_ptr, seed_ptr, pos_ptr,
    token_ptr, token_stride, confidence_ptr, confidence_stride,
    cache_ptr, cache_stride, cache_k_stride,
    num_drafts, num_inner, r, vocab_size,
    NOISED_ARGMAX: tl.constexpr, DRAW: tl.constexpr, USE_FP64: tl.constexpr,
    R: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    UNIT: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """All drafts of one request; a leaf of one block is read once and stays in registers.

    RANK: of the bias of the token before; 0: none, and its pointers are None.
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
        source, target = source_ptr, target_ptr
        if RANK > 0:
            source += before * RANK
            target += target_k_stride.to(tl.int64) * k
        top = tl.full([R], float("-inf"), tl.float32)
        total = tl.full([R], 0.0, tl.float32)
        if BLOCKS == 1:
            tile = load_conditioned(
                leaf, z_stride, source, target, target_stride, in_block, vocab_size, r, R, RANK, CHUNK
            )
            top, total = launches.add_block(tile, top, total)
        else:
            for block in range(BLOCKS):
                token = block * BLOCK + in_block
                logits = load_conditioned(
                    leaf, z_stride, source, target, target_stride, token, vocab_size, r, R, RANK, CHUNK
                )
                top, total = launches.add_block(logits, top, total)
        norm = machine.finite(top) + tl.log(total)

        largest = tl.full([], float("-inf"), tl.float64 if USE_FP64 else tl.float32)
        chosen = tl.full([], 0, tl.int64)
        q_top = tl.full([], float("-inf"), tl.float32)
        first = tl.full([], 0.0, tl.float32)
        second = tl.full([], 0.0, tl.float32)
        for block in range(BLOCKS):
            token = block * BLOCK + in_block
            if BLOCKS > 1:
                tile = load_conditioned(
                    leaf, z_stride, source, target, target_stride, token, vocab_size, r, R, RANK, CHUNK
                )
            log_q = launches.mixture(tile, weights, norm)
            mask = token < vocab_size
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

        tl.store(token_ptr + row * token_stride + k, chosen)
        tl.store(confidence_ptr + row * confidence_stride + k, launches.confidence(first, second, temperature, DRAW))
        if k + 1 < num_drafts:
            message = launches.evidence(leaf, z_stride, chosen, norm, r, R)
            if RANK > 0:
                before = chosen
            weights, stack = machine.advance(program_ptr, k + 2, weights, stack, message, inner_ptr, r, R, DEPTH)
