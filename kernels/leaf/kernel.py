"""`naive.terms` and, for float8 weights, `naive.logits` in Triton.

One tile is BLOCK_V rows of one unembedding times BLOCK_B states, accumulated in float32. Instances that differ in
their states only are neighbours: weights beyond the first BLOCK_B requests come from the cache, not from memory.

    terms   1. every tile: per state its largest logit, the sum of exp(logit - largest) and, if it is there, the token's
            2. every (request, component): the log of the whole sum, beside the token's logit
    logits  one launch: every tile, times the scales of its rows

Block sizes are reasoned, not measured.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V, MAX_BLOCK_B = 64, 64
# Triton's interpreter multiplies the bits of bfloat16 numbers as integers; products are the same in float32
WIDEN: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def _tile(
    state_ptr,
    state_stride,
    weight_ptr,
    scale_ptr,
    b,
    v,
    batch,
    vocab_size,
    hidden_size,
    HAS_SCALE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Logits [BLOCK_V, BLOCK_B] of rows v for states b; float8 weights come as their bytes."""
    total = tl.zeros((BLOCK_V, BLOCK_B), dtype=tl.float32)
    states = state_ptr + b.to(tl.int64)[None, :] * state_stride
    rows = weight_ptr + v.to(tl.int64)[:, None] * hidden_size
    for start in range(0, hidden_size, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        state_mask = (d[:, None] < hidden_size) & (b[None, :] < batch)
        weight_mask = (v[:, None] < vocab_size) & (d[None, :] < hidden_size)
        x = tl.load(states + d[:, None], mask=state_mask, other=0.0)
        if HAS_SCALE:
            w = tl.load(rows + d[None, :], mask=weight_mask, other=0).to(tl.float8e4nv, bitcast=True).to(x.dtype)
        else:
            w = tl.load(rows + d[None, :], mask=weight_mask, other=0.0)
        if WIDEN:
            w, x = w.to(tl.float32), x.to(tl.float32)
        total = tl.dot(w, x, total, input_precision="ieee")
    if HAS_SCALE:
        total = total * tl.load(scale_ptr + v, mask=v < vocab_size, other=0.0)[:, None]
    return total


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["token_ptr"])
def _term_blocks(
    state_ptr,
    state_stride,
    state_stride_z,
    weight_ptr,
    scale_ptr,
    token_ptr,
    top_ptr,
    sum_ptr,
    picked_ptr,
    batch,
    r,
    vocab_size,
    hidden_size,
    HAS_SCALE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    z = tl.program_id(2).to(tl.int64)
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    x = _tile(
        state_ptr + z * state_stride_z,
        state_stride,
        weight_ptr + z * vocab_size * hidden_size,
        scale_ptr + z * vocab_size,
        b,
        v,
        batch,
        vocab_size,
        hidden_size,
        HAS_SCALE,
        BLOCK_B,
        BLOCK_V,
        BLOCK_D,
    )
    x = tl.where(v[:, None] < vocab_size, x, float("-inf"))
    top = tl.max(x, axis=0)  # finite: every block has a row
    mass = tl.sum(tl.exp(x - top[None, :]), axis=0)
    out = b.to(tl.int64) * r + z
    at = out * tl.num_programs(1) + tl.program_id(1)
    tl.store(top_ptr + at, top, mask=b < batch)
    tl.store(sum_ptr + at, mass, mask=b < batch)
    token = tl.load(token_ptr + b, mask=b < batch, other=-1)
    is_token = (v[:, None] == token[None, :]) & (v[:, None] < vocab_size)
    is_here = tl.sum(is_token.to(tl.int32), axis=0) > 0
    tl.store(picked_ptr + out, tl.sum(tl.where(is_token, x, 0.0), axis=0), mask=is_here & (b < batch))


@triton.jit(do_not_specialize_on_alignment=["token_ptr"])
def _join_terms(top_ptr, sum_ptr, picked_ptr, token_ptr, out_ptr, r, vocab_size, num_blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    z = tl.program_id(1)
    blocks = tl.arange(0, BLOCKS)
    at = (row * r + z) * num_blocks + blocks
    top = tl.load(top_ptr + at, mask=blocks < num_blocks, other=float("-inf"))
    mass = tl.load(sum_ptr + at, mask=blocks < num_blocks, other=0.0)
    largest = tl.max(top, axis=0)
    norm = tl.log(tl.sum(mass * tl.exp(top - largest), axis=0)) + largest
    token = tl.load(token_ptr + row)
    is_inside = (token >= 0) & (token < vocab_size)  # elsewhere nothing was picked
    tl.store(out_ptr + 2 * row * r + z, norm)
    picked = tl.load(picked_ptr + row * r + z, mask=is_inside, other=float("-inf"))
    tl.store(out_ptr + (2 * row + 1) * r + z, picked)


@triton.jit(do_not_specialize=["batch"])
def _logit_tiles(
    state_ptr,
    state_stride,
    state_stride_k,
    state_stride_z,
    weight_ptr,
    scale_ptr,
    out_ptr,
    batch,
    r,
    vocab_size,
    hidden_size,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    group = tl.program_id(2).to(tl.int64)
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    x = _tile(
        state_ptr + group // r * state_stride_k + group % r * state_stride_z,
        state_stride,
        weight_ptr + group * vocab_size * hidden_size,
        scale_ptr + group * vocab_size,
        b,
        v,
        batch,
        vocab_size,
        hidden_size,
        True,
        BLOCK_B,
        BLOCK_V,
        BLOCK_D,
    )
    out = out_ptr + (b.to(tl.int64)[None, :] * tl.num_programs(2) + group) * vocab_size + v[:, None]
    tl.store(out, x.to(out_ptr.dtype.element_ty), mask=(v[:, None] < vocab_size) & (b[None, :] < batch))


def terms(states: Tensor, weight: Tensor, scale: Tensor | None, token: Tensor) -> Tensor:
    """As `naive.terms`, of logits that are not rounded to a half precision; weights and scales are contiguous."""
    batch, r, vocab_size = len(states), *weight.shape[:2]
    out = states.new_empty(batch, 2, r, dtype=torch.float32)
    if not batch:
        return out
    states = states if states.stride(2) == 1 else states.contiguous()
    num_blocks = triton.cdiv(vocab_size, BLOCK_V)
    top, mass = (states.new_empty(batch, r, num_blocks, dtype=torch.float32) for _ in range(2))
    picked = states.new_empty(batch, r, dtype=torch.float32)
    block_b, token = _block_b(batch), token.contiguous()
    _term_blocks[(triton.cdiv(batch, block_b), num_blocks, r)](
        states,
        states.stride(0),
        _stride(states, 1),
        *_plain(weight, scale),
        token,
        top,
        mass,
        picked,
        batch,
        r,
        vocab_size,
        weight.shape[2],
        HAS_SCALE=scale is not None,
        BLOCK_B=block_b,
        BLOCK_V=BLOCK_V,
        BLOCK_D=_block_d(states),
    )
    blocks = triton.next_power_of_2(num_blocks)
    _join_terms[(batch, r)](top, mass, picked, token, out, r, vocab_size, num_blocks, BLOCKS=blocks)
    return out


def logits(states: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """As `naive.logits` for float8 weights with their scales, both contiguous."""
    batch, (positions, r, vocab_size, hidden_size) = len(states), weight.shape
    out = states.new_empty(batch, positions, r, vocab_size)
    if not out.numel():
        return out
    states = states if states.stride(3) == 1 else states.contiguous()
    block_b = _block_b(batch)
    _logit_tiles[(triton.cdiv(batch, block_b), triton.cdiv(vocab_size, BLOCK_V), positions * r)](
        states,
        states.stride(0),
        _stride(states, 1),
        _stride(states, 2),
        *_plain(weight, scale),
        out,
        batch,
        r,
        vocab_size,
        hidden_size,
        BLOCK_B=block_b,
        BLOCK_V=BLOCK_V,
        BLOCK_D=_block_d(states),
    )
    return out


def batches(largest: int) -> list[int]:
    """Batches up to `largest` that need everything to be compiled: strides of a batch of 1 differ, then block sizes."""
    return [batch for batch in (1, 2, 17, 33) if batch <= largest]


def _block_b(batch: int) -> int:
    return min(MAX_BLOCK_B, max(16, triton.next_power_of_2(batch)))  # tl.dot takes 16 and more


def _block_d(states: Tensor) -> int:
    return 128 if states.element_size() == 2 else 32  # several tiles at once must fit shared memory


def _stride(states: Tensor, dim: int) -> int:
    """0 along a dimension of 1: the state is the same for all."""
    return states.stride(dim) if states.shape[dim] > 1 else 0


def _plain(weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Pointers that a launch can take: float8 as bytes, and something in the place of scales that are not there."""
    weight = weight.contiguous()
    return (weight, weight) if scale is None else (weight.view(torch.uint8), scale.contiguous())
