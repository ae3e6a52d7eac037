"""Kernels that diverge, fall back or fail in the fast interpreter, for its tests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

SIZE = 64


@triton.jit
def parts(x_ptr, out_ptr, SIZE: tl.constexpr):
    """Instances diverge at an `if` and at loops, after a store."""
    row, at = tl.program_id(0), tl.arange(0, SIZE)
    x = tl.load(x_ptr + row * SIZE + at, mask=at < row, other=0.0)
    before = tl.load(out_ptr + row)
    tl.store(out_ptr + row, before + 1)
    total = tl.max(x, axis=0)
    if row % 3 == 0:
        total = tl.sum(x[:, None] * tl.full((SIZE, 2), 0.5, tl.float32), axis=0)
        total = tl.sum(total, axis=0)
    for i in range(row, row + row % 4):
        total += i
    tl.store(out_ptr + row, tl.load(out_ptr + row) + total)


@triton.jit
def tiles(x_ptr, out_ptr, SIZE: tl.constexpr):
    row, column = tl.arange(0, 8), tl.arange(0, SIZE // 8)
    x = tl.load(x_ptr + row[:, None] * (SIZE // 8) + column[None, :])
    turned = tl.load(x_ptr + row[None, :] * (SIZE // 8) + column[:, None])
    tl.store(out_ptr + column, tl.sum(x, axis=0))
    tl.store(out_ptr + SIZE + row, tl.sum(turned * 3.0, axis=0))
    tl.store(out_ptr + 2 * SIZE + row, tl.max(x, axis=1))
    tl.store(out_ptr + 3 * SIZE + row, tl.argmax(x, axis=1))
    tl.store(out_ptr + 4 * SIZE + tl.arange(0, SIZE), tl.reshape(turned, (SIZE,)))
    tl.store(out_ptr + 5 * SIZE + row[:, None] * 8 + row[None, :], tl.dot(x, turned))
    tl.store(out_ptr + 6 * SIZE + tl.arange(0, 2 * SIZE), tl.interleave(x, x + 1.0).reshape(2 * SIZE))
    tl.store(out_ptr + 8 * SIZE, tl.sum(x))


@triton.jit
def sorts(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.sort(tl.load(x_ptr + at)))


@triton.jit
def doubled(x):
    return x * 2


@triton.jit
def negated(x):
    return -x


@triton.jit
def scales(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, doubled(tl.load(x_ptr + at)))


@triton.jit
def writes_then_sorts(x_ptr, out_ptr, IS_SORTED: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, x)
    if IS_SORTED:
        tl.store(out_ptr + at, x.sort())  # a method: not seen before it runs


def launch_all() -> None:
    finite = torch.randn(SIZE, generator=torch.Generator().manual_seed(8))
    tiles[(1,)](finite, torch.zeros(9 * SIZE), SIZE=SIZE)
    sorts[(1,)](finite, torch.zeros(SIZE), SIZE=SIZE)
