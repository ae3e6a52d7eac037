"""`naive.terms` in Triton, in two launches (README.md); block sizes are derived, not measured."""

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
    state_ptr, state_stride, weight_ptr, token_ptr, top_ptr, sum_ptr, picked_ptr,
    batch, r, vocab_size, hidden_size,
    BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of exp and the token's logit of one tile [BLOCK_V, BLOCK_B] of logits of component z."""
    z = tl.program_id(2).to(tl.int64)
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row, is_state = v[:, None] < vocab_size, b[None, :] < batch
    states = state_ptr + b.to(tl.int64)[None, :] * state_stride
    rows = weight_ptr + z * vocab_size * hidden_size + v.to(tl.int64)[:, None] * hidden_size
    x = tl.zeros((BLOCK_V, BLOCK_B), dtype=tl.float32)
    for start in range(0, hidden_size, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        state = tl.load(states + d[:, None], mask=(d[:, None] < hidden_size) & is_state, other=0.0)
        row_mask = is_row & (d[None, :] < hidden_size)
        row = tl.load(rows + d[None, :], mask=row_mask, other=0.0)
        if WIDEN:
            row, state = row.to(tl.float32), state.to(tl.float32)
        x = tl.dot(row, state, x, input_precision="ieee")
    x = tl.where(is_row, x, float("-inf"))
    top = tl.max(x, axis=0)  # finite: every block has a row
    mass = tl.sum(tl.exp(x - top[None, :]), axis=0)
    out = b.to(tl.int64) * r + z
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


def terms(states: Tensor, weight: Tensor, token: Tensor) -> Tensor:
    """Return `naive.terms`, of logits that are not rounded to a half precision."""
    batch, (r, vocab_size, hidden_size) = len(states), weight.shape
    out = states.new_empty(batch, 2, r, dtype=torch.float32)
    if not batch:
        return out
    states, token = states if states.stride(1) == 1 else states.contiguous(), token.contiguous()
    num_blocks = triton.cdiv(vocab_size, BLOCK_V.value)
    top, mass = (states.new_empty(batch, r, num_blocks, dtype=torch.float32) for _ in range(2))
    picked = states.new_empty(batch, r, dtype=torch.float32)
    block_b = min(MAX_BLOCK_B, max(16, triton.next_power_of_2(batch)))  # tl.dot takes 16 and more
    block_d = 128 if states.element_size() == 2 else 32  # several tiles at once must fit shared memory
    shared = {"token_ptr": token, "top_ptr": top, "sum_ptr": mass, "picked_ptr": picked}
    shared |= {"r": r, "vocab_size": vocab_size}
    _tiles[(triton.cdiv(batch, block_b), num_blocks, r)](
        **shared, state_ptr=states, state_stride=states.stride(0), weight_ptr=weight.contiguous(),
        batch=batch, hidden_size=hidden_size, BLOCK_B=block_b, BLOCK_D=block_d,
    )  # fmt: skip
    blocks = triton.next_power_of_2(num_blocks)
    _join_terms[(batch, r)](**shared, out_ptr=out, num_blocks=num_blocks, BLOCKS=blocks)
    return out


def batches(largest: int) -> list[int]:
    """Return the batch sizes up to `largest` that compile every variant; a batch of 1 has other strides."""
    return [batch for batch in (1, 2, 17, 33) if batch <= largest]
