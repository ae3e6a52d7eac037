"""Drafts of large leaves in blocks of the vocabulary: `leaf_blocks`, `start_rows`; `draft_blocks`, `choose` per draft.

Between launches a circuit's state lies in memory: weights [B, R], stack [B, DEPTH, R], its depth [B].

Where the vocabulary is divided over ranks, `nominate`, `elect` and, at the end, `spread` are in the place of `choose`:
each rank says which token of its own it would draft, all elect one of them, and the conditionals are gathered once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_mtpc.kernels.draft import parts


@triton.jit(do_not_specialize=["leaf_stride", "k_stride", "z_stride", "num_drafts"])
def leaf_blocks(
    leaf_ptr,
    leaf_stride,
    k_stride,
    z_stride,
    top_ptr,
    total_ptr,
    num_drafts,
    r,
    vocab_size,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Maximum and sum of every component in one block of one leaf."""
    block, k, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    leaf = leaf_ptr + (row * leaf_stride + k.to(tl.int64) * k_stride) * UNIT
    token = block * BLOCK + tl.arange(0, BLOCK)
    tile = parts.tile(leaf, z_stride.to(tl.int64) * UNIT, token, vocab_size, r, R)
    top, total = parts.add_block(tile, tl.full([R], float("-inf"), tl.float32), tl.full([R], 0.0, tl.float32))
    at = ((row * num_drafts + k) * tl.num_programs(0) + block) * R + tl.arange(0, R)
    tl.store(top_ptr + at, top)
    tl.store(total_ptr + at, total)


@triton.jit(do_not_specialize=["num_drafts", "num_inner"])
def start_rows(
    evidence_ptr,
    root_ptr,
    inner_ptr,
    code_ptr,
    begins_ptr,
    top_ptr,
    total_ptr,
    norm_ptr,
    weights_ptr,
    stack_ptr,
    depth_ptr,
    num_drafts,
    num_inner,
    r,
    num_blocks,
    R: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Normalisers [R] of one leaf from those of its blocks; beside the first leaf the weights it is read with."""
    k, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    z = tl.arange(0, R)
    top, total = tl.full([R], float("-inf"), tl.float32), tl.full([R], 0.0, tl.float32)
    for first in range(0, num_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)[:, None]
        at = ((row * num_drafts + k) * num_blocks + block) * R + z[None, :]
        tops = tl.load(top_ptr + at, mask=block < num_blocks, other=float("-inf"))
        totals = tl.load(total_ptr + at, mask=block < num_blocks, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        shift = parts.finite(new_top)
        total = total * tl.exp(top - shift) + tl.sum(totals * tl.exp(tops - shift[None, :]), axis=0)
        top = new_top
    norm = parts.finite(top) + tl.log(total)
    tl.store(norm_ptr + (row * num_drafts + k) * R + z, norm)
    if k == 0:
        weights, stack, depth = parts.start(
            evidence_ptr, root_ptr, inner_ptr, code_ptr, begins_ptr, row, num_inner, r, R, DEPTH
        )
        tl.store(weights_ptr + row * R + z, weights)
        tl.store(stack_ptr + (row * DEPTH + tl.arange(0, DEPTH)[:, None]) * R + z[None, :], stack)
        tl.store(depth_ptr + row, depth)


@triton.jit(
    do_not_specialize=["leaf_stride", "k_stride", "z_stride", "k", "num_drafts"],
    do_not_specialize_on_alignment=["slot_ptr", "pos_ptr"],
)
def draft_blocks(
    leaf_ptr,
    leaf_stride,
    k_stride,
    z_stride,
    norm_ptr,
    weights_ptr,
    slot_ptr,
    temperature_ptr,
    seed_ptr,
    pos_ptr,
    cache_ptr,
    cache_stride,
    cache_k_stride,
    value_ptr,
    index_ptr,
    moments_ptr,
    k,
    num_drafts,
    r,
    vocab_size,
    begin,
    NOISED_ARGMAX: tl.constexpr,
    DRAW: tl.constexpr,
    USE_FP64: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One block of the conditional of draft k: into the cache, its noised argmax, its moments.

    begin, where it is not None: the first token of this rank; its cache has a row per request instead of slots.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot, temperature, scale, seed, pos = parts.request(slot_ptr, temperature_ptr, seed_ptr, pos_ptr, row, DRAW)
    z = tl.arange(0, R)
    weights = tl.load(weights_ptr + row * R + z)
    norm = tl.load(norm_ptr + (row * num_drafts + k) * R + z)
    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = token < vocab_size
    leaf = leaf_ptr + (row * leaf_stride + k.to(tl.int64) * k_stride) * UNIT
    log_q = parts.mixture(parts.tile(leaf, z_stride.to(tl.int64) * UNIT, token, vocab_size, r, R), weights, norm)
    if cache_ptr is not None:
        log_q = parts.rounded(log_q, cache_ptr)
        cached = cache_ptr + (slot if begin is None else row) * cache_stride + k.to(tl.int64) * cache_k_stride
        tl.store(cached + token, log_q, mask=mask & (slot >= 0))
    q_top, first, second = parts.add_moments(
        log_q, scale, tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    )
    key = token if begin is None else token + begin
    value, index = NOISED_ARGMAX(log_q, key, mask, seed, pos + k, temperature, IS_DRAFTING=False, USE_FP64=USE_FP64)
    at = row * tl.num_programs(0) + block
    tl.store(value_ptr + at, value)
    tl.store(index_ptr + at, block * BLOCK + index)
    tl.store(moments_ptr + 3 * at, q_top)
    tl.store(moments_ptr + 3 * at + 1, first)
    tl.store(moments_ptr + 3 * at + 2, second)


@triton.jit(
    do_not_specialize=["leaf_stride", "k_stride", "z_stride", "k", "num_drafts", "num_inner"],
    do_not_specialize_on_alignment=["slot_ptr", "token_ptr", "confidence_ptr"],
)
def choose(
    leaf_ptr,
    leaf_stride,
    k_stride,
    z_stride,
    inner_ptr,
    code_ptr,
    begins_ptr,
    norm_ptr,
    weights_ptr,
    stack_ptr,
    depth_ptr,
    slot_ptr,
    temperature_ptr,
    value_ptr,
    index_ptr,
    moments_ptr,
    token_ptr,
    token_stride,
    confidence_ptr,
    confidence_stride,
    k,
    num_drafts,
    num_inner,
    r,
    num_blocks,
    DRAW: tl.constexpr,
    R: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Draft k and its confidence from its blocks; then the weights of draft k + 1."""
    row = tl.program_id(0).to(tl.int64)
    leaf = leaf_ptr + (row * leaf_stride + k.to(tl.int64) * k_stride) * UNIT
    _, token, _, first, second = parts.best(value_ptr, index_ptr, moments_ptr, row, num_blocks, BLOCKS)
    token_ptr, confidence_ptr = token_ptr + row * token_stride + k, confidence_ptr + row * confidence_stride + k
    parts.keep(token_ptr, confidence_ptr, token, first, second, slot_ptr + row, temperature_ptr, DRAW)
    if k + 1 < num_drafts:
        norm = tl.load(norm_ptr + (row * num_drafts + k) * R + tl.arange(0, R))
        message = parts.evidence(leaf, z_stride.to(tl.int64) * UNIT, token, norm, r, R)
        inner_ptr += row * num_inner * r * r
        parts.step(code_ptr, begins_ptr, weights_ptr, stack_ptr, depth_ptr, row, k, message, inner_ptr, r, R, DEPTH)


@triton.jit(do_not_specialize=["leaf_stride", "k_stride", "z_stride", "begin", "k", "num_drafts"])
def nominate(
    leaf_ptr,
    leaf_stride,
    k_stride,
    z_stride,
    norm_ptr,
    value_ptr,
    index_ptr,
    moments_ptr,
    record_ptr,
    begin,
    k,
    num_drafts,
    r,
    num_blocks,
    R: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNIT: tl.constexpr,
):
    """What a rank hands in for draft k, [5 + R]: its best token's noised value, that token, the moments, the evidence.

    All in the dtype of the values: tokens below 2^24 are exact in float32.
    """
    row = tl.program_id(0).to(tl.int64)
    leaf = leaf_ptr + (row * leaf_stride + k.to(tl.int64) * k_stride) * UNIT
    value, token, top, first, second = parts.best(value_ptr, index_ptr, moments_ptr, row, num_blocks, BLOCKS)
    norm = tl.load(norm_ptr + (row * num_drafts + k) * R + tl.arange(0, R))
    record_ptr += row * (5 + R)
    tl.store(record_ptr, value)
    tl.store(record_ptr + 1, token + begin)
    tl.store(record_ptr + 2, top)
    tl.store(record_ptr + 3, first)
    tl.store(record_ptr + 4, second)
    message = parts.evidence(leaf, z_stride.to(tl.int64) * UNIT, token, norm, r, R)
    tl.store(record_ptr + 5 + tl.arange(0, R), message)


@triton.jit(
    do_not_specialize=["k", "num_drafts", "num_inner"],
    do_not_specialize_on_alignment=["slot_ptr", "token_ptr", "confidence_ptr"],
)
def elect(
    record_ptr,
    inner_ptr,
    code_ptr,
    begins_ptr,
    weights_ptr,
    stack_ptr,
    depth_ptr,
    slot_ptr,
    temperature_ptr,
    token_ptr,
    token_stride,
    confidence_ptr,
    confidence_stride,
    k,
    num_drafts,
    num_inner,
    r,
    num_ranks,
    DRAW: tl.constexpr,
    R: tl.constexpr,
    DEPTH: tl.constexpr,
    RANKS: tl.constexpr,
):
    """`choose` from the records [num_ranks, B, 5 + R] of all ranks."""
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, RANKS)
    mask = rank < num_ranks
    at = record_ptr + (rank.to(tl.int64) * tl.num_programs(0) + row) * (5 + R)
    _, winner = tl.max(tl.load(at, mask=mask, other=float("-inf")), axis=0, return_indices=True)
    _, first, second = parts.total(at + 2, at + 3, at + 4, mask)
    record_ptr += (winner.to(tl.int64) * tl.num_programs(0) + row) * (5 + R)
    token_ptr, confidence_ptr = token_ptr + row * token_stride + k, confidence_ptr + row * confidence_stride + k
    token = tl.load(record_ptr + 1).to(tl.int64)
    parts.keep(token_ptr, confidence_ptr, token, first, second, slot_ptr + row, temperature_ptr, DRAW)
    if k + 1 < num_drafts:
        message = tl.load(record_ptr + 5 + tl.arange(0, R)).to(tl.float32)
        inner_ptr += row * num_inner * r * r
        parts.step(code_ptr, begins_ptr, weights_ptr, stack_ptr, depth_ptr, row, k, message, inner_ptr, r, R, DEPTH)


@triton.jit(do_not_specialize=["num_drafts"], do_not_specialize_on_alignment=["slot_ptr"])
def spread(
    log_q_ptr,
    slot_ptr,
    cache_ptr,
    cache_stride,
    cache_k_stride,
    num_drafts,
    rows,
    width,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Conditionals [ranks, B, K, width] of all ranks, `rows` columns each, into the cache."""
    block, k, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = (token < vocab_size) & (slot >= 0)
    rank = (token // rows).to(tl.int64)
    at = ((rank * tl.num_programs(2) + row) * num_drafts + k) * width + token % rows
    log_q = tl.load(log_q_ptr + at, mask=mask, other=0.0)
    tl.store(cache_ptr + slot * cache_stride + k.to(tl.int64) * cache_k_stride + token, log_q, mask=mask)
