"""The machine of `program.py` as Triton functions, which the draft kernels call; `naive.advance` is their definition.

Vectors [R] have r values, R = next power of two; values beyond r are -inf in weights, stack and messages of a sum, and
-inf or finite in evidence. The stack is a tile [DEPTH, R] in registers. A distribution whose every term is -inf stays
-inf, where PyTorch returns NaN.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mtpc.kernels.filter.program import CHANGE, Instruction, Op, Program

CONDITION: tl.constexpr = tl.constexpr(int(Op.CONDITION))
TRANSITION: tl.constexpr = tl.constexpr(int(Op.TRANSITION))
PUSH: tl.constexpr = tl.constexpr(int(Op.PUSH))
UPWARD: tl.constexpr = tl.constexpr(int(Op.UPWARD))


def encode(program: Program, device: torch.device) -> tuple[Tensor, int]:
    """Return the program for `advance`, int32 [max(N, n + 2), 4], and DEPTH.

    Row i: op, inner sum and stack index of instruction i; index of the first instruction of list i.
    """
    return _encoded(tuple(map(tuple, program)), device)


@lru_cache(maxsize=64)
def _encoded(program: tuple[tuple[Instruction, ...], ...], device: torch.device) -> tuple[Tensor, int]:
    rows, begins, depth = [], [0], 0
    for instructions in program:
        for op, index in instructions:
            rows.append((int(op), index, depth if op == Op.PUSH else depth - 1))
            depth += CHANGE.get(op, 0)
        begins.append(len(rows))
    table = torch.zeros(max(len(rows), len(begins)), 4, dtype=torch.int32)
    table[: len(rows), :3] = torch.tensor(rows, dtype=torch.int32).view(-1, 3)
    table[: len(begins), 3] = torch.tensor(begins, dtype=torch.int32)
    return table.to(device), triton.next_power_of_2(max([1, *(place + 1 for *_, place in rows)]))


@triton.jit
def finite(top):
    """Return what to subtract before exp, for a maximum `top`."""
    return tl.where(top > float("-inf"), top, 0.0)


@triton.jit
def log_sum_exp(x, axis: tl.constexpr):
    """Log-sum-exp along an axis of a tile; -inf if all terms are."""
    top = finite(tl.max(x, axis=axis))
    return tl.log(tl.sum(tl.exp(x - tl.expand_dims(top, axis)), axis=axis)) + top


@triton.jit
def normalise(x):
    """Log-softmax of a vector [R]; all -inf stays so."""
    return tl.where(x == float("-inf"), x, x - log_sum_exp(x, 0))


@triton.jit
def load_vector(ptr, r, R: tl.constexpr):
    """Load r values as float32, -inf beyond."""
    z = tl.arange(0, R)
    return tl.load(ptr + z, mask=z < r, other=float("-inf")).to(tl.float32)


@triton.jit
def load_sum(inner_ptr, index, r, R: tl.constexpr):
    """Rows log p(z' | z) [R, R] from the logits [F, r, r] at inner_ptr; -inf beyond r."""
    z = tl.arange(0, R)
    mask = (z[:, None] < r) & (z[None, :] < r)
    offset = index.to(tl.int64) * r * r + z[:, None] * r + z[None, :]
    x = tl.load(inner_ptr + offset, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(x == float("-inf"), x, x - tl.expand_dims(log_sum_exp(x, 1), 1))


@triton.jit
def pop(stack, place, DEPTH: tl.constexpr):
    """The vector at index `place`."""
    rows = tl.arange(0, DEPTH)
    return tl.sum(tl.where(rows[:, None] == place, stack, 0.0), axis=0)


@triton.jit
def push(stack, place, vector, DEPTH: tl.constexpr):
    """The stack with `vector` at index `place`."""
    rows = tl.arange(0, DEPTH)
    return tl.where(rows[:, None] == place, vector[None, :], stack)


@triton.jit
def advance(program_ptr, k, weights, stack, message, inner_ptr, r, R: tl.constexpr, DEPTH: tl.constexpr):
    """Weights and stack after list k of the program."""
    for at in range(tl.load(program_ptr + 4 * k + 3), tl.load(program_ptr + 4 * k + 7)):
        op, index = tl.load(program_ptr + 4 * at), tl.load(program_ptr + 4 * at + 1)
        place = tl.load(program_ptr + 4 * at + 2)
        if op == CONDITION:
            weights = normalise(weights + message)
        elif op == TRANSITION:
            weights = log_sum_exp(weights[:, None] + load_sum(inner_ptr, index, r, R), 0)
        elif op == PUSH:
            stack = push(stack, place, weights, DEPTH)
        elif op == UPWARD:
            below = pop(stack, place, DEPTH) + message
            message = log_sum_exp(load_sum(inner_ptr, index, r, R) + below[None, :], 1)
        else:
            weights = normalise(pop(stack, place, DEPTH) + message)
            stack = push(stack, place, message, DEPTH)
    return weights, stack
