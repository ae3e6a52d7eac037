"""Drafts of large leaves in blocks of the vocabulary: `leaf_blocks`, `start_rows`; `draft_blocks`, `choose` per draft.

Between launches a circuit's state lies in memory: weights [B, R], stack [B, DEPTH, R], its depth [B].
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_mtpc.kernels.draft import parts
from vllm_mtpc.kernels.filter import machine


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
    NOISED_ARGMAX: tl.constexpr,
    DRAW: tl.constexpr,
    USE_FP64: tl.constexpr,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """One block of the conditional of draft k: into the cache, its noised argmax, its moments."""
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
        cached = cache_ptr + slot * cache_stride + k.to(tl.int64) * cache_k_stride
        tl.store(cached + token, log_q, mask=mask & (slot >= 0))
    q_top, first, second = parts.add_moments(
        log_q, scale, tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
    )
    value, index = NOISED_ARGMAX(log_q, token, mask, seed, pos + k, temperature, IS_DRAFTING=False, USE_FP64=USE_FP64)
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
    blocks = tl.arange(0, BLOCKS)
    mask = blocks < num_blocks
    at = row * num_blocks + blocks
    _, block = tl.max(tl.load(value_ptr + at, mask=mask, other=float("-inf")), axis=0, return_indices=True)
    token = tl.load(index_ptr + row * num_blocks + block).to(tl.int64)
    tops = tl.load(moments_ptr + 3 * at, mask=mask, other=float("-inf"))
    old = tl.exp(tops - parts.finite(tl.max(tops, axis=0)))
    first = tl.sum(old * tl.load(moments_ptr + 3 * at + 1, mask=mask, other=0.0), axis=0)
    second = tl.sum(old * old * tl.load(moments_ptr + 3 * at + 2, mask=mask, other=0.0), axis=0)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0)
    tl.store(token_ptr + row * token_stride + k, token)
    tl.store(confidence_ptr + row * confidence_stride + k, parts.confidence(first, second, temperature, DRAW))
    if k + 1 < num_drafts:
        z = tl.arange(0, R)
        at_stack = (row * DEPTH + tl.arange(0, DEPTH)[:, None]) * R + z[None, :]
        norm = tl.load(norm_ptr + (row * num_drafts + k) * R + z)
        weights, stack, depth = machine.advance(
            code_ptr,
            begins_ptr,
            k + 2,
            tl.load(weights_ptr + row * R + z),
            tl.load(stack_ptr + at_stack),
            tl.load(depth_ptr + row),
            parts.evidence(leaf, z_stride.to(tl.int64) * UNIT, token, norm, r, R),
            inner_ptr + row * num_inner * r * r,
            r,
            R,
            DEPTH,
        )
        tl.store(weights_ptr + row * R + z, weights)
        tl.store(stack_ptr + at_stack, stack)
        tl.store(depth_ptr + row, depth)
