"""`naive.pick` in Triton (README.md): sums of all blocks; then the block that u falls into, and the token in it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _first_over(mass, threshold, SIZE: tl.constexpr):
    """The first index with mass at which the running sum exceeds `threshold`; else the last with mass; else -1."""
    index = tl.arange(0, SIZE)
    has_mass = mass > 0.0
    over = has_mass & (tl.cumsum(mass, axis=0) > threshold)
    first = tl.min(tl.where(over, index, SIZE), axis=0)
    last = tl.max(tl.where(has_mass, index, -1), axis=0)
    return tl.minimum(first, last)


@triton.jit
def _sum_blocks(logits_ptr, row_stride, top_ptr, sum_ptr, vocab_size, BLOCK: tl.constexpr):
    row, block, num_blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x > float("-inf"), x, float("-inf"))  # NaN
    top = tl.max(x, axis=0)
    mass = tl.where(x > float("-inf"), tl.exp(x - top), 0.0)
    tl.store(top_ptr + row * num_blocks + block, top)
    tl.store(sum_ptr + row * num_blocks + block, tl.sum(mass.to(tl.float64), axis=0))


@triton.jit
def _pick_rows(
    logits_ptr, row_stride, u_ptr, top_ptr, sum_ptr, token_ptr, vocab_size, BLOCK: tl.constexpr, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    num_blocks = (vocab_size + BLOCK - 1) // BLOCK
    blocks = tl.arange(0, BLOCKS)
    mask = blocks < num_blocks
    tops = tl.load(top_ptr + row * num_blocks + blocks, mask=mask, other=float("-inf"))
    sums = tl.load(sum_ptr + row * num_blocks + blocks, mask=mask, other=0.0)
    scale = tl.where(tops > float("-inf"), tl.exp((tops - tl.max(tops, axis=0)).to(tl.float64)), 0.0)
    mass = sums * scale
    threshold = tl.load(u_ptr + row).to(tl.float64) * tl.sum(mass, axis=0)
    block = _first_over(mass, threshold, BLOCKS)

    is_chosen = blocks == block
    top = tl.max(tl.where(is_chosen, tops, float("-inf")), axis=0)
    before = tl.sum(tl.where(blocks < block, mass, 0.0), axis=0)
    within = (threshold - before) / tl.sum(tl.where(is_chosen, scale, 0.0), axis=0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = (token >= 0) & (token < vocab_size)
    x = tl.load(logits_ptr + row * row_stride + token, mask=mask, other=float("-inf")).to(tl.float32)
    in_block = tl.where(x > float("-inf"), tl.exp(x - top), 0.0)
    index = _first_over(in_block.to(tl.float64), within, BLOCK)
    tl.store(token_ptr + row, tl.where(index < 0, vocab_size - 1, block * BLOCK + index).to(tl.int64))


def pick(logits: Tensor, u: Tensor) -> Tensor:
    """Return `naive.pick`; half precisions are read as float32."""
    num_rows, vocab_size = logits.shape
    token = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return token
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_blocks = triton.cdiv(vocab_size, BLOCK)
    top = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(num_rows, num_blocks, dtype=torch.float64, device=logits.device)
    shared = {"logits_ptr": logits, "row_stride": logits.stride(0), "top_ptr": top, "sum_ptr": sums}
    shared |= {"vocab_size": vocab_size, "BLOCK": BLOCK, "num_warps": 8}
    _sum_blocks[(num_rows, num_blocks)](**shared)
    blocks = triton.next_power_of_2(num_blocks)
    _pick_rows[(num_rows,)](**shared, u_ptr=u.contiguous(), token_ptr=token, BLOCKS=blocks)
    return token
