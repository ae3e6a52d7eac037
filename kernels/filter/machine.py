"""The machine of `program.py` as Triton functions, for kernels to build on: one program instance is one circuit.

Vectors [R] hold r values, R = next power of two; what is beyond r is -inf in weights, stack and messages that a sum has
made, and -inf or anything finite in evidence. The stack is a tile [DEPTH, R] in registers with the number of its
vectors. A distribution whose every term is -inf stays -inf, where PyTorch makes NaN of it; NaN stays NaN.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mtpc.kernels.filter.program import Instruction, Op, Program, stack_depth

CONDITION: tl.constexpr = tl.constexpr(int(Op.CONDITION))
TRANSITION: tl.constexpr = tl.constexpr(int(Op.TRANSITION))
PUSH: tl.constexpr = tl.constexpr(int(Op.PUSH))
UPWARD: tl.constexpr = tl.constexpr(int(Op.UPWARD))


def encode(program: Program, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """The program for `advance`: instructions [N, 2] int32, where each list begins [n + 2] int32, DEPTH."""
    return _encoded(tuple(map(tuple, program)), device)


@lru_cache(maxsize=64)
def _encoded(program: tuple[tuple[Instruction, ...], ...], device: torch.device) -> tuple[Tensor, Tensor, int]:
    flat = [(int(op), index) for instructions in program for op, index in instructions] or [(int(Op.CONDITION), -1)]
    begins = [0]
    for instructions in program:
        begins.append(begins[-1] + len(instructions))
    return (
        torch.tensor(flat, dtype=torch.int32, device=device),
        torch.tensor(begins, dtype=torch.int32, device=device),
        triton.next_power_of_2(max(1, stack_depth(program))),
    )


@triton.jit
def log_sum_exp(x, axis: tl.constexpr):
    """Along an axis of a tile [R, R]; -inf where all are."""
    top = tl.max(x, axis=axis)
    top = tl.where(top > float("-inf"), top, 0.0)
    return tl.log(tl.sum(tl.exp(x - tl.expand_dims(top, axis)), axis=axis)) + top


@triton.jit
def normalise(x):
    """Log-softmax of a vector [R]; all -inf stays so."""
    top = tl.max(x, axis=0)
    top = tl.where(top > float("-inf"), top, 0.0)
    total = tl.log(tl.sum(tl.exp(x - top), axis=0)) + top
    return tl.where(x == float("-inf"), x, x - total)


@triton.jit
def load_vector(ptr, r, R: tl.constexpr):
    """r values as float32, -inf beyond."""
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
def pop(stack, top, DEPTH: tl.constexpr):
    """The vector at index `top`."""
    rows = tl.arange(0, DEPTH)
    return tl.max(tl.where(rows[:, None] == top, stack, float("-inf")), axis=0)


@triton.jit
def push(stack, top, vector, DEPTH: tl.constexpr):
    """The stack with `vector` at index `top`."""
    rows = tl.arange(0, DEPTH)
    return tl.where(rows[:, None] == top, vector[None, :], stack)


@triton.jit
def advance(
    code_ptr,
    begins_ptr,
    k,
    weights,
    stack,
    depth,
    message,
    inner_ptr,
    r,
    R: tl.constexpr,
    DEPTH: tl.constexpr,
    tape_ptr=None,
):
    """Weights, stack and depth after list k of the program.

    tape_ptr: row `at` of [N, r] float32 becomes what the backward of instruction `at` reads (README.md): what a sum
    was applied to, else the weights that were made.
    """
    z = tl.arange(0, R)
    for at in range(tl.load(begins_ptr + k), tl.load(begins_ptr + k + 1)):
        op = tl.load(code_ptr + 2 * at)
        index = tl.load(code_ptr + 2 * at + 1)
        kept = weights
        if op == CONDITION:
            weights = normalise(weights + message)
            kept = weights
        elif op == TRANSITION:
            weights = log_sum_exp(weights[:, None] + load_sum(inner_ptr, index, r, R), 0)
        elif op == PUSH:
            stack = push(stack, depth, weights, DEPTH)
            depth += 1
        elif op == UPWARD:
            depth -= 1
            kept = pop(stack, depth, DEPTH) + message
            message = log_sum_exp(load_sum(inner_ptr, index, r, R) + kept[None, :], 1)
        else:
            weights = normalise(pop(stack, depth - 1, DEPTH) + message)
            stack = push(stack, depth - 1, message, DEPTH)
            kept = weights
        if tape_ptr is not None:
            tl.store(tape_ptr + at * r + z, kept, mask=z < r)
    return weights, stack, depth
