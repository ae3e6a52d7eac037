"""Kernels that use operators, types and values which the others hardly do: every cast, edges of numbers, atomics."""

from __future__ import annotations

import itertools
from contextlib import suppress

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import InterpreterError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SIZE = 64


@triton.jit
def parts(x_ptr, out_ptr, SIZE: tl.constexpr):
    """Instances part at an `if` and at loops, behind a store."""
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
def casts(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at))
    tl.store(out_ptr + SIZE, tl.load(x_ptr + 3))  # a scalar goes another way


@triton.jit
def arithmetic(a_ptr, b_ptr, scalar, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    one = tl.load(a_ptr + 5)
    tl.store(out_ptr + at, a + b)
    tl.store(out_ptr + SIZE + at, a * b - 3)
    tl.store(out_ptr + 2 * SIZE + at, tl.maximum(a, scalar) + tl.minimum(b, one))
    tl.store(out_ptr + 3 * SIZE + at, tl.where(a < b, a, 2.5 * b))
    tl.store(out_ptr + 4 * SIZE + at, -a)
    tl.store(out_ptr + 5 * SIZE + at, (a == b) & (b != one) | (a >= scalar))
    tl.store(out_ptr + 6 * SIZE + at, tl.abs(a) + one * 7)
    tl.store(out_ptr + 7 * SIZE, tl.sum(a, axis=0))
    tl.store(out_ptr + 7 * SIZE + 1, tl.max(b, axis=0))
    value, index = tl.min(b, axis=0, return_indices=True)
    tl.store(out_ptr + 7 * SIZE + 2, value)
    tl.store(out_ptr + 7 * SIZE + 3, index)
    tl.store(out_ptr + 8 * SIZE + at, tl.cumsum(b, axis=0))


@triton.jit
def integers(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    divisor = tl.where(b == 0, 3, b)
    tl.store(out_ptr + at, a // divisor)
    tl.store(out_ptr + SIZE + at, a % divisor)
    tl.store(out_ptr + 2 * SIZE + at, (a >> 3) ^ (b << 2))
    tl.store(out_ptr + 3 * SIZE + at, ~a)
    tl.store(out_ptr + 4 * SIZE + at, (a / divisor).to(tl.int32, bitcast=True))
    first = tl.load(a_ptr + 2)
    tl.store(out_ptr + 5 * SIZE, first // tl.load(b_ptr + 1))
    tl.store(out_ptr + 5 * SIZE + 1, first % -7)
    tl.store(out_ptr + 5 * SIZE + 2, tl.cdiv(tl.program_id(0) + 9, 4))


@triton.jit
def functions(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, tl.exp(x))
    tl.store(out_ptr + SIZE + at, tl.log(x) + tl.log2(y))
    tl.store(out_ptr + 2 * SIZE + at, tl.exp2(x) * tl.sqrt(y) + tl.rsqrt(x))
    tl.store(out_ptr + 3 * SIZE + at, tl.sin(x) - tl.cos(y))
    tl.store(out_ptr + 4 * SIZE + at, tl.floor(x) + tl.ceil(y))
    tl.store(out_ptr + 5 * SIZE + at, tl.fma(x, y, x))
    tl.store(out_ptr + 6 * SIZE + at, tl.sigmoid(x) + tl.clamp(y, -1.0, 1.0))
    tl.store(out_ptr + 7 * SIZE + at, tl.softmax(x, 0))
    tl.store(out_ptr + 8 * SIZE + at, x % y)
    tl.store(out_ptr + 9 * SIZE, tl.exp(tl.load(y_ptr + 1)) / tl.load(x_ptr + 7))


@triton.jit
def noise(seed, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.rand(seed, at))
    tl.store(out_ptr + SIZE + at, tl.randn(seed, at))
    tl.store(out_ptr + 2 * SIZE + at, tl.randint(seed, at.to(tl.int64)))


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
def atomics(counter_ptr, at_ptr, out_ptr, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    at = tl.load(at_ptr + lane)
    before = tl.atomic_add(counter_ptr + at, lane + 1, mask=lane < 50)  # some addresses more than once
    tl.store(out_ptr + lane, before, mask=lane < 50)
    tl.atomic_max(counter_ptr + at, lane)
    tl.atomic_or(counter_ptr + tl.program_id(0), 1 << tl.program_id(1))


@triton.jit
def transposes(x_ptr, out_ptr, SIZE: tl.constexpr):
    row = tl.arange(0, 8)
    x = tl.load(x_ptr + row[:, None] * 8 + row[None, :])
    tl.store(out_ptr + row, tl.sum(tl.trans(x) * 3.0, axis=0))


@triton.jit
def sorts(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.sort(tl.load(x_ptr + at)))


@triton.jit
def compares_chained(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, 0 < tl.load(x_ptr + at) < 5)


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


def numbers(dtype: torch.dtype, seed: int) -> Tensor:
    """SIZE numbers, edges among them where the type has any."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(SIZE, generator=generator) < 0.5
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        spread = torch.randint(max(info.min, -(2**40)), min(info.max, 2**40), (SIZE,), generator=generator)
        return spread.to(dtype)
    edges = torch.tensor([0.0, -0.0, 1e-40, float("inf"), float("-inf"), float("nan"), 3e38, 1e-5])
    return torch.cat([torch.randn(SIZE - len(edges), generator=generator) * 20, edges]).to(dtype)


def launch_all() -> None:
    everything = (*FLOATS, *INTEGERS)
    for source, target in (*itertools.product(everything, everything), *itertools.product(FLOAT8, FLOATS)):
        if source is not target:
            with suppress(InterpreterError):  # of the few that Triton's interpreter cannot: neither can
                casts[(1,)](numbers(source, 1), torch.zeros(SIZE + 1, dtype=target), SIZE=SIZE)
    for a, b in itertools.product((torch.float16, torch.float32, torch.float64, *INTEGERS[1:]), repeat=2):
        out = torch.zeros(9 * SIZE, dtype=torch.float64 if a.is_floating_point or b.is_floating_point else torch.int64)
        scalar = 2 if a.is_floating_point == b.is_floating_point else 1.5
        arithmetic[(1,)](numbers(a, 2), numbers(b, 3), scalar, out, SIZE=SIZE)
    for dtype in INTEGERS[2:]:
        integers[(1,)](numbers(dtype, 4), numbers(dtype, 5) // 3, torch.zeros(6 * SIZE, dtype=torch.int64), SIZE=SIZE)
    for dtype in (torch.float32, torch.float64):
        functions[(1,)](numbers(dtype, 6), numbers(dtype, 7), torch.zeros(10 * SIZE, dtype=dtype), SIZE=SIZE)
    noise[(1,)](12345, torch.zeros(3 * SIZE), SIZE=SIZE)
    finite = torch.randn(SIZE, generator=torch.Generator().manual_seed(8))
    tiles[(1,)](finite, torch.zeros(9 * SIZE), SIZE=SIZE)
    at = torch.randint(9, (SIZE,), generator=torch.Generator().manual_seed(9))
    atomics[(2, 3)](torch.zeros(9, dtype=torch.int32), at, torch.zeros(SIZE, dtype=torch.int32), SIZE=SIZE)
    transposes[(1,)](finite, torch.zeros(SIZE), SIZE=SIZE)
    sorts[(1,)](finite, torch.zeros(SIZE), SIZE=SIZE)
    compares_chained[(1,)](finite, torch.zeros(SIZE), SIZE=SIZE)
