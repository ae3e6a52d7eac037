"""Tiles [R, BLOCK] of a leaf's logits, components by tokens; low-rank components and biases of the token before."""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton's interpreter multiplies the bits of bfloat16 numbers as integers; products are the same in float32
WIDEN: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOW_CHUNK: tl.constexpr = tl.constexpr(16)  # columns of the components' differences, or of W1, in a product of tiles


@triton.jit
def load_tile(leaf_ptr, z_stride, token, vocab_size, r, R: tl.constexpr):
    """Logits [R, BLOCK] of tokens [BLOCK], float32: -inf beyond the vocabulary, 0 in the rows beyond r."""
    z = tl.arange(0, R)
    inside = (z[:, None] < r) & (token[None, :] < vocab_size)
    offset = z[:, None].to(tl.int64) * z_stride + token[None, :]
    x = tl.load(leaf_ptr + offset, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(z[:, None] < r, x, 0.0)


@triton.jit
def load_low(low_ptr, begin, r, R: tl.constexpr, LOW: tl.constexpr):
    """Columns [R, LOW_CHUNK] of low [r, LOW], the components' differences (`kernels/leaf.py`)."""
    z, c = tl.arange(0, R), begin + tl.arange(0, LOW_CHUNK)
    low = tl.load(low_ptr + z[:, None] * LOW + c[None, :], mask=(z[:, None] < r) & (c[None, :] < LOW), other=0.0)
    return low.to(tl.float32) if WIDEN else low


@triton.jit
def move_out(leaf, k, LOW: tl.constexpr):
    """Pointer to the rows of out [LOW, V] of a draft; None without."""
    out_ptr = leaf.out_ptr
    if LOW > 0:
        out_ptr += k * leaf.out_k_stride
    return out_ptr


@triton.jit
def load_out(out_ptr, out_stride, begin, token, vocab_size, LOW: tl.constexpr):
    """Rows [LOW_CHUNK, BLOCK] of out [LOW, V]; LOW 0: 0."""
    out = 0
    if LOW > 0:
        c, is_token = begin + tl.arange(0, LOW_CHUNK)[:, None], token[None, :] < vocab_size
        out = tl.load(out_ptr + c.to(tl.int64) * out_stride + token[None, :], mask=(c < LOW) & is_token, other=0.0)
        out = out.to(tl.float32) if WIDEN else out
    return out


@triton.jit
def load_leaf(
    leaf_ptr, z_stride, low_ptr, out_ptr, out_stride, out, token, vocab_size, r,
    R: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """A tile; LOW > 0: of common logits and the differences low times out, whose first rows `out` are loaded."""
    if LOW == 0:
        tile = load_tile(leaf_ptr, z_stride, token, vocab_size, r, R)
    else:
        tile = tl.dot(load_low(low_ptr, 0, r, R, LOW), out, input_precision="ieee")
        for begin in range(LOW_CHUNK, LOW, LOW_CHUNK):
            more = load_out(out_ptr, out_stride, begin, token, vocab_size, LOW)
            tile = tl.dot(load_low(low_ptr, begin, r, R, LOW), more, tile, input_precision="ieee")
        common = tl.load(leaf_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        tile = tl.where(tl.arange(0, R)[:, None] < r, tile + common[None, :], 0.0)
    return tile


@triton.jit
def evidence(
    leaf_ptr, z_stride, low_ptr, out_ptr, out_stride, token, norm, r,
    R: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Return log p(token | z) [R], finite beyond r."""
    at = leaf_ptr + tl.arange(0, R).to(tl.int64) * (0 if LOW > 0 else z_stride) + token
    x = tl.load(at, mask=tl.arange(0, R) < r, other=0.0).to(tl.float32)
    if LOW > 0:
        for begin in range(0, LOW, LOW_CHUNK):
            c = begin + tl.arange(0, LOW_CHUNK)
            out = tl.load(out_ptr + c.to(tl.int64) * out_stride + token, mask=c < LOW, other=0.0).to(tl.float32)
            x += tl.sum(load_low(low_ptr, begin, r, R, LOW).to(tl.float32) * out[None, :], axis=1)
    return tl.where(x > float("-inf"), x - norm, float("-inf"))


@triton.jit
def load_bias(bias, before_ptr, before_stride, k, begin, batch, token, vocab_size, sizes: tl.constexpr):
    """Bias [ROWS, BLOCK] float32 of the tokens before of the requests from `begin` on; RANK 0: 0."""
    terms = 0.0
    if sizes.RANK > 0:
        target_ptr = bias.target_ptr + k.to(tl.int64) * bias.k_stride
        row = begin + tl.arange(0, sizes.ROWS)
        before = tl.load(before_ptr + row * before_stride, mask=row < batch, other=0).to(tl.int64)
        terms = tl.zeros([sizes.ROWS, token.shape[0]], tl.float32)
        for low in range(0, sizes.RANK, LOW_CHUNK):
            j = low + tl.arange(0, LOW_CHUNK)
            mask = (row[:, None] < batch) & (j[None, :] < sizes.RANK)
            given = tl.load(bias.source_ptr + before[:, None] * sizes.RANK + j[None, :], mask=mask, other=0.0)
            taken = load_out(target_ptr, bias.stride, low, token, vocab_size, sizes.RANK)
            given = given.to(tl.float32) if WIDEN else given
            terms = tl.dot(given, taken, terms, input_precision="ieee")
    return terms


@triton.jit
def add_bias(tile, bias, index, RANK: tl.constexpr, ROWS: tl.constexpr):
    """Add row `index` of bias [ROWS, BLOCK] to the tile of a request; RANK 0: nothing."""
    if RANK > 0:
        tile += tl.sum(tl.where(tl.arange(0, ROWS)[:, None] == index, bias, 0.0), axis=0)[None, :]
    return tile


@triton.jit
def load_biased(
    leaf_ptr, z_stride, source_ptr, target_ptr, target_stride, token, vocab_size, r,
    CHUNK: tl.constexpr, sizes: tl.constexpr,
):  # fmt: skip
    """A tile, with the bias W1[before] W2_k of a bigram (`kernels/leaf.py`), products in float32; RANK 0: none.

    source_ptr: the row of W1 [RANK] of the token before; target_ptr: W2_k [RANK, V], read CHUNK rows at a time.
    """
    tile = load_tile(leaf_ptr, z_stride, token, vocab_size, r, sizes.R)
    if sizes.RANK > 0:
        bias = tl.zeros_like(token).to(tl.float32)
        for low in range(0, sizes.RANK, CHUNK):
            j = low + tl.arange(0, CHUNK)
            given = tl.load(source_ptr + j, mask=j < sizes.RANK, other=0.0).to(tl.float32)
            mask = (j[:, None] < sizes.RANK) & (token[None, :] < vocab_size)
            taken = tl.load(target_ptr + j[:, None].to(tl.int64) * target_stride + token[None, :], mask=mask, other=0.0)
            bias += tl.sum(given[:, None] * taken.to(tl.float32), axis=0)
        tile += bias[None, :]
    return tile
