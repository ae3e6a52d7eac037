"""Kernels in both interpreters (see scripts/interpreter): those of this package on unit-test inputs, and odd ones.

To be called in a fork of "v2" (tests/support/forks.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy_interpreter import check, functions, language, launch, memory
from numpy_interpreter.values import Value
from triton.runtime.interpreter import InterpreterError

from tests.support import draft_cases, filter_cases, interpreted, kernel_cases
from vllm_mtpc.kernels.shard import Shard

# Small ones, and what others do not have: types, paths, constants
FEW = {
    *("alone", "empty rows", "int32 positions", "width 2, int32", "width 1", "next to others"),
    *("one", "a block but one", "a block", "more blocks than one", "wide-btree", "bfloat16", "holes-hmm"),
    *("two tokens", "padded", "padded, blocks", "one block, several launches", "no draws", "float64 noise, blocks"),
    *("bfloat16 cache, blocks", "token, padded", "token, padded, blocks", "picks of bfloat16", "trust of bfloat16"),
}
# The second of two ranks, which hears its own from both
ON_A_RANK = replace(draft_cases.BLOCKS, shard=Shard(1, 2, 1300, lambda own: own.repeat(2, 1), 1400))
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


def launch_all(is_few: bool) -> None:
    for cases, run in (
        (kernel_cases.CASES, interpreted.launch_all),
        (filter_cases.CASES, filter_cases.launch_all),
        (draft_cases.CASES, draft_cases.draft_all),
    ):
        chosen = {name: case for name, case in cases.items() if name in FEW or not is_few}
        interpreted.poisoned(run, chosen, "cpu")
    interpreted.poisoned(draft_cases.draft_all, {"a rank": ON_A_RANK}, "cpu")
    finite = torch.randn(SIZE, generator=torch.Generator().manual_seed(8))
    tiles[(1,)](finite, torch.zeros(9 * SIZE), SIZE=SIZE)
    sorts[(1,)](finite, torch.zeros(SIZE), SIZE=SIZE)


def _other_order(x: Value, axis: int | None = None) -> Value:
    return language._sum(Value(np.flip(x.data, axis).copy(), x.kind), axis)


def _other_dtype(x: Value) -> Value:
    return Value(np.exp(x.data.astype(np.float64)).astype(x.kind.dtype), x.kind)


def _lost_store(pointer: Value, value: Value, mask: Value | None = None) -> None:
    if pointer.shape:
        memory.store(pointer, value, mask)


INJECTED = {"order": ("sum", _other_order), "dtype": ("exp", _other_dtype), "lost store": ("store", _lost_store)}


def found_with(name: str, fault: Callable) -> dict[str, Any]:
    """What comparing finds in a few launches with a function of the language replaced."""
    generator = torch.Generator().manual_seed(0)
    logits, u = torch.randn(4, 5001, generator=generator), torch.rand(4, generator=generator)
    right = getattr(functions._LANGUAGE, name)
    setattr(functions._LANGUAGE, name, fault)
    check.REPORT.clear()
    check.SEEN.clear()
    interpreted.launch_all({"pick": ("pick", (logits, u))}, "cpu")
    tiles[(1,)](logits, torch.zeros(9 * SIZE), SIZE=SIZE)
    setattr(functions._LANGUAGE, name, right)
    return dict(check.REPORT)


def compare(is_few: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what comparing launches of the cases of FEW or all found, and the same of each fault of INJECTED.

    With MTPC_INTERPRETER=check or check-once.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # masked lanes: -inf - -inf among them
    launch_all(is_few)
    report = dict(check.REPORT)
    return report, {name: found_with(*fault) for name, fault in INJECTED.items()}


def fall_back() -> None:
    x, out = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)), torch.zeros(SIZE)
    sorts[(1,)](x, out, SIZE=SIZE)
    assert torch.equal(out, x.sort().values)
    assert [kernel.__name__ for kernel in launch.fallen_back] == ["sorts"], launch.fallen_back

    scales[(1,)](x, out, SIZE=SIZE)
    assert torch.equal(out, 2 * x)
    with mock.patch(f"{__name__}.doubled", negated):  # as a test that injects a fault does
        scales[(1,)](x, out, SIZE=SIZE)
    assert torch.equal(out, -x)

    out.zero_()
    with pytest.raises(InterpreterError, match=r"tensor\.sort"):
        writes_then_sorts[(1,)](x, out, True, SIZE=SIZE)
    assert out[0] == x[0], "ran twice"
    writes_then_sorts[(1,)](x, out, False, SIZE=SIZE)
    assert torch.equal(out, x)
    assert len(launch.fallen_back) == 1


def diverge() -> None:
    x, outs = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)), []
    for launch.is_at_once in (False, True):
        outs.append(torch.zeros(48))
        parts[(48,)](x, outs[-1], SIZE=32)
    assert torch.allclose(*outs, rtol=1e-6) and not launch.one_by_one and outs[0].unique().numel() > 40, outs
