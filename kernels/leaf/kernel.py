"""`naive.terms` and, for float8 weights, `naive.logits` in Triton.

One tile is BLOCK_V rows of one unembedding times BLOCK_B states, accumulated in float32. Instances that differ in
their states only are neighbours: weights beyond the first BLOCK_B requests come from the cache, not from memory.

    terms   1. every tile: per state its largest logit, the sum of exp(logit - largest) and, if it is there, the token's
            2. every (request, component): the log of the whole sum, next to the token's logit
    logits  one launch: every tile, times the scales of its rows

Block sizes are reasoned, not measured.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V: tl.constexpr = tl.constexpr(64)
MAX_BLOCK_B = 64
# Triton's interpreter multiplies the bits of bfloat16 numbers as integers; products are the same in float32
WIDEN: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["token_ptr"])
def _tiles(
    state_ptr,
    state_stride,
    state_stride_k,
    state_stride_z,
    weight_ptr,
    scale_ptr,
    logits_ptr,
    token_ptr,
    top_ptr,
    sum_ptr,
    picked_ptr,
    batch,
    r,
    vocab_size,
    hidden_size,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Logits [BLOCK_V, BLOCK_B] of rows v for states b: written down, or without logits_ptr what `terms` needs of them.

    Weights with scales are float8 and come as their bytes.
    """
    group = tl.program_id(2).to(tl.int64)
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row, is_state = v[:, None] < vocab_size, b[None, :] < batch
    states = state_ptr + group // r * state_stride_k + group % r * state_stride_z
    states += b.to(tl.int64)[None, :] * state_stride
    rows = weight_ptr + group * vocab_size * hidden_size + v.to(tl.int64)[:, None] * hidden_size
    x = tl.zeros((BLOCK_V, BLOCK_B), dtype=tl.float32)
    for start in range(0, hidden_size, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        state = tl.load(states + d[:, None], mask=(d[:, None] < hidden_size) & is_state, other=0.0)
        row_mask = is_row & (d[None, :] < hidden_size)
        if scale_ptr is not None:
            row = tl.load(rows + d[None, :], mask=row_mask, other=0).to(tl.float8e4nv, bitcast=True).to(state.dtype)
        else:
            row = tl.load(rows + d[None, :], mask=row_mask, other=0.0)
        if WIDEN:
            row, state = row.to(tl.float32), state.to(tl.float32)
        x = tl.dot(row, state, x, input_precision="ieee")
    if scale_ptr is not None:
        x = x * tl.load(scale_ptr + group * vocab_size + v, mask=v < vocab_size, other=0.0)[:, None]
    if logits_ptr is not None:
        out = logits_ptr + (b.to(tl.int64)[None, :] * tl.num_programs(2) + group) * vocab_size + v[:, None]
        tl.store(out, x.to(logits_ptr.dtype.element_ty), mask=is_row & is_state)
    else:
        x = tl.where(is_row, x, float("-inf"))
        top = tl.max(x, axis=0)  # finite: every block has a row
        mass = tl.sum(tl.exp(x - top[None, :]), axis=0)
        out = b.to(tl.int64) * r + group
        at = out * tl.num_programs(1) + tl.program_id(1)
        tl.store(top_ptr + at, top, mask=b < batch)
        tl.store(sum_ptr + at, mass, mask=b < batch)
        token = tl.load(token_ptr + b, mask=b < batch, other=-1)
        is_token = (v[:, None] == token[None, :]) & is_row
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


def terms(states: Tensor, weight: Tensor, scale: Tensor | None, token: Tensor) -> Tensor:
    """As `naive.terms`, of logits that are not rounded to a half precision; weights and scales are contiguous."""
    batch, (r, vocab_size) = len(states), weight.shape[:2]
    out = states.new_empty(batch, 2, r, dtype=torch.float32)
    if not batch:
        return out
    num_blocks, token = triton.cdiv(vocab_size, BLOCK_V.value), token.contiguous()
    top, mass = (states.new_empty(batch, r, num_blocks, dtype=torch.float32) for _ in range(2))
    picked = states.new_empty(batch, r, dtype=torch.float32)
    scale = None if scale is None else scale[None]
    _launch(states[:, None], weight[None], scale, None, token, top, mass, picked)
    blocks = triton.next_power_of_2(num_blocks)
    _join_terms[(batch, r)](top, mass, picked, token, out, r, vocab_size, num_blocks, BLOCKS=blocks)
    return out


def logits(states: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """As `naive.logits` for float8 weights with their scales, both contiguous."""
    out = states.new_empty(len(states), *weight.shape[:3])
    if out.numel():
        _launch(states, weight, scale, out, None, None, None, None)
    return out


def _launch(states: Tensor, weight: Tensor, scale: Tensor | None, *out: Tensor | None) -> None:
    """Every tile of states [B, k or 1, r or 1, D] and weights [k, r, V, D]; out: from the logits to what is picked."""
    batch, (positions, r, vocab_size, hidden_size) = len(states), weight.shape
    states = states if states.stride(3) == 1 else states.contiguous()
    strides = (states.stride(dim) if dim == 0 or states.shape[dim] > 1 else 0 for dim in range(3))  # 0: one for all
    if scale is not None:
        weight, scale = weight.view(torch.uint8), scale.contiguous()
    block_b = min(MAX_BLOCK_B, max(16, triton.next_power_of_2(batch)))  # tl.dot takes 16 and more
    block_d = 128 if states.element_size() == 2 else 32  # several tiles at once must fit shared memory
    given, sizes = (states, *strides, weight.contiguous(), scale, *out), (batch, r, vocab_size, hidden_size)
    _tiles[(triton.cdiv(batch, block_b), triton.cdiv(vocab_size, BLOCK_V.value), positions * r)](
        *given, *sizes, BLOCK_B=block_b, BLOCK_D=block_d
    )


def batches(largest: int) -> list[int]:
    """Batches up to `largest` that need everything to be compiled: strides of a batch of 1 differ, then block sizes."""
    return [batch for batch in (1, 2, 17, 33) if batch <= largest]
