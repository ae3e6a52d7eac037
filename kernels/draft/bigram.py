"""The bias W1[before] W2_k of a bigram (`kernels/bigram.py`) as Triton functions.

Both sum products in float32. A row of W1 has RANK numbers, W2_k is [RANK, V], read in chunks of CHUNK rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_mtpc.kernels.leaf.kernel import WIDEN


@triton.jit
def block_bias(source_ptr, target_ptr, target_stride, token, is_token, RANK: tl.constexpr, CHUNK: tl.constexpr):
    """Bias [BLOCK] of tokens after the one whose row of W1 is at source_ptr; target_ptr: W2_k. 0 without is_token."""
    bias = tl.zeros_like(token).to(tl.float32)
    for start in range(0, RANK, CHUNK):
        j = start + tl.arange(0, CHUNK)
        given = tl.load(source_ptr + j, mask=j < RANK, other=0.0).to(tl.float32)
        inside = (j[:, None] < RANK) & is_token[None, :]
        taken = tl.load(target_ptr + j[:, None].to(tl.int64) * target_stride + token[None, :], mask=inside, other=0.0)
        bias += tl.sum(given[:, None] * taken.to(tl.float32), axis=0)
    return bias


@triton.jit(do_not_specialize=["before_stride", "k", "batch"], do_not_specialize_on_alignment=["before_ptr"])
def token_bias(
    before_ptr, before_stride, source_ptr, target_ptr, target_k_stride, target_stride,
    bias_ptr, width, k, batch, vocab_size,
    RANK: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bias [B, width] float32 of draft k, ROWS requests and BLOCK tokens at a time: W2_k is read once for ROWS of them.

    0 in columns beyond vocab_size.
    """
    row, token = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_row, row = row < batch, row.to(tl.int64)
    before = tl.load(before_ptr + row * before_stride, mask=is_row, other=0).to(tl.int64)
    target_ptr += k.to(tl.int64) * target_k_stride
    bias = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, RANK, CHUNK):
        j = start + tl.arange(0, CHUNK)
        mask = is_row[:, None] & (j[None, :] < RANK)
        given = tl.load(source_ptr + before[:, None] * RANK + j[None, :], mask=mask, other=0.0)
        mask = (j[:, None] < RANK) & (token[None, :] < vocab_size)
        taken = tl.load(target_ptr + j[:, None].to(tl.int64) * target_stride + token[None, :], mask=mask, other=0.0)
        if WIDEN:
            given, taken = given.to(tl.float32), taken.to(tl.float32)
        bias = tl.dot(given, taken, bias, input_precision="ieee")
    tl.store(bias_ptr + row[:, None] * width + token[None, :], bias, mask=is_row[:, None] & (token[None, :] < width))
