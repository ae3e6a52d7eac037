"""The machine of `program.py` as Triton functions; `naive.filter_weights` made of them, with its backward.

One launch runs one program instance per circuit, so that its result does not depend on its batch. Vectors [R] have r
values, R = next power of two; values beyond r are -inf in weights, stack and messages of a sum, and -inf or finite in
evidence. The stack is a tile [DEPTH, R] in registers. A distribution whose every term is -inf stays -inf, where PyTorch
returns NaN. For gradients the forward stores a tape of one vector per instruction; the backward runs them in reverse.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

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
def instruction(program_ptr, at):
    """Operation, inner sum and stack index."""
    return tl.load(program_ptr + 4 * at), tl.load(program_ptr + 4 * at + 1), tl.load(program_ptr + 4 * at + 2)


@triton.jit
def advance(program_ptr, k, weights, stack, message, inner_ptr, r, R: tl.constexpr, DEPTH: tl.constexpr, tape_ptr=None):
    """Weights and stack after list k of the program.

    tape_ptr: row `at` of [N, r] float32 is written for the backward of instruction `at` (README.md): the input of a
    sum, else the new weights.
    """
    z = tl.arange(0, R)
    for at in range(tl.load(program_ptr + 4 * k + 3), tl.load(program_ptr + 4 * k + 7)):
        op, index, place = instruction(program_ptr, at)
        kept = weights
        if op == CONDITION:
            weights = normalise(weights + message)
            kept = weights
        elif op == TRANSITION:
            weights = log_sum_exp(weights[:, None] + load_sum(inner_ptr, index, r, R), 0)
        elif op == PUSH:
            stack = push(stack, place, weights, DEPTH)
        elif op == UPWARD:
            kept = pop(stack, place, DEPTH) + message
            message = log_sum_exp(load_sum(inner_ptr, index, r, R) + kept[None, :], 1)
        else:
            weights = normalise(pop(stack, place, DEPTH) + message)
            stack = push(stack, place, message, DEPTH)
            kept = weights
        if tape_ptr is not None:
            tl.store(tape_ptr + at * r + z, kept, mask=z < r)
    return weights, stack


@triton.jit(do_not_specialize=["m", "num_inner", "num_kept"])
def _filter(
    program_ptr, root_ptr, inner_ptr, evidence_ptr, weights_ptr, tape_ptr,
    m, r, num_inner, num_kept,
    R: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    circuit = tl.program_id(0).to(tl.int64)
    evidence_ptr += circuit * m * r
    inner_ptr += circuit * num_inner * r * r
    weights_ptr += circuit * m * r
    if tape_ptr is not None:
        tape_ptr += circuit * num_kept * r
    z = tl.arange(0, R)
    weights = normalise(load_vector(root_ptr + circuit * r, r, R))
    stack = tl.full([DEPTH, R], float("-inf"), tl.float32)
    message = weights  # the first list reads none
    for k in range(m):
        weights, stack = advance(program_ptr, k, weights, stack, message, inner_ptr, r, R, DEPTH, tape_ptr)
        tl.store(weights_ptr + k * r + z, weights, mask=z < r)
        message = load_vector(evidence_ptr + k * r, r, R)


@triton.jit
def _through_softmax(adjoint, log_probs, axis: tl.constexpr):
    """The adjoint of x from that of log_softmax(x) along an axis."""
    return adjoint - tl.exp(log_probs) * tl.expand_dims(tl.sum(adjoint, axis=axis), axis)


@triton.jit
def _share(terms, total):
    """exp(terms - total), the share of each term in its sum; 0 where the sum has no mass."""
    return tl.where(total == float("-inf"), 0.0, tl.exp(terms - total))


@triton.jit
def _add_sum_gradient(grad_ptr, index, adjoint, log_probs, r, R: tl.constexpr):
    """Add the adjoint [R, R] of the rows of one sum to the gradient [F, r, r] of the logits of inner sums.

    A sum with a TRANSITION and an UPWARD is written twice by the same instance: hence the barrier.
    """
    z = tl.arange(0, R)
    mask = (z[:, None] < r) & (z[None, :] < r)
    at = grad_ptr + index.to(tl.int64) * r * r + z[:, None] * r + z[None, :]
    tl.debug_barrier()
    before = tl.load(at, mask=mask, other=0.0)
    tl.store(at, before + _through_softmax(adjoint, log_probs, 1), mask=mask)


@triton.jit
def _retreat(
    program_ptr, k, weights, stack, inner_ptr, grad_inner_ptr, tape_ptr, r, R: tl.constexpr, DEPTH: tl.constexpr
):
    """Adjoints of weights, stack and message before list k of the program, from those of weights and stack after."""
    message = tl.zeros([R], tl.float32)
    end = tl.load(program_ptr + 4 * k + 7)
    for back in range(end - tl.load(program_ptr + 4 * k + 3)):
        at = end - 1 - back
        op, index, place = instruction(program_ptr, at)
        kept = load_vector(tape_ptr + at * r, r, R)
        if op == CONDITION:
            weights = _through_softmax(weights, kept, 0)
            message += weights
        elif op == TRANSITION:
            log_probs = load_sum(inner_ptr, index, r, R)
            terms = kept[:, None] + log_probs
            adjoint = _share(terms, log_sum_exp(terms, 0)[None, :]) * weights[None, :]
            _add_sum_gradient(grad_inner_ptr, index, adjoint, log_probs, r, R)
            weights = tl.sum(adjoint, axis=1)
        elif op == PUSH:
            weights += pop(stack, place, DEPTH)
        elif op == UPWARD:
            log_probs = load_sum(inner_ptr, index, r, R)
            terms = log_probs + kept[None, :]
            adjoint = _share(terms, log_sum_exp(terms, 1)[:, None]) * message[:, None]
            _add_sum_gradient(grad_inner_ptr, index, adjoint, log_probs, r, R)
            message = tl.sum(adjoint, axis=0)
            stack = push(stack, place, message, DEPTH)
        else:
            given = pop(stack, place, DEPTH)
            opened = _through_softmax(weights, kept, 0)
            stack = push(stack, place, opened, DEPTH)
            message += given + opened
            weights = tl.zeros([R], tl.float32)  # the weights before the sibling are not used after it
    return weights, stack, message


@triton.jit(do_not_specialize=["m", "num_inner", "num_kept"])
def _filter_backward(
    program_ptr, root_ptr, inner_ptr, tape_ptr,
    grad_weights_ptr, grad_evidence_ptr, grad_root_ptr, grad_inner_ptr,
    m, r, num_inner, num_kept,
    R: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    circuit = tl.program_id(0).to(tl.int64)
    inner_ptr += circuit * num_inner * r * r
    grad_inner_ptr += circuit * num_inner * r * r
    tape_ptr += circuit * num_kept * r
    grad_weights_ptr += circuit * m * r
    grad_evidence_ptr += circuit * m * r
    z = tl.arange(0, R)
    weights = tl.zeros([R], tl.float32)
    stack = tl.zeros([DEPTH, R], tl.float32)
    message = tl.zeros([R], tl.float32)
    for back in range(m):
        k = m - 1 - back
        tl.store(grad_evidence_ptr + k * r + z, message, mask=z < r)
        weights += tl.load(grad_weights_ptr + k * r + z, mask=z < r, other=0.0).to(tl.float32)
        weights, stack, message = _retreat(
            program_ptr, k, weights, stack, inner_ptr, grad_inner_ptr, tape_ptr, r, R, DEPTH
        )
    root = normalise(load_vector(root_ptr + circuit * r, r, R))
    tl.store(grad_root_ptr + circuit * r + z, _through_softmax(weights, root, 0), mask=z < r)


def filter_weights(program: Program, evidence: Tensor, root_logits: Tensor, inner_logits: Tensor) -> Tensor:
    """Return `naive.filter_weights` for r <= 128, with gradients for r <= 64; they have their input's dtype."""
    inputs = evidence.contiguous(), root_logits.contiguous(), inner_logits.contiguous()
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return _FilterWeights.apply(program, *inputs)
    return _forward(program, *inputs, keep=False)[0]


class _FilterWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: Program, evidence: Tensor, root_logits: Tensor, inner_logits: Tensor) -> Tensor:
        weights, tape = _forward(program, evidence, root_logits, inner_logits, keep=True)
        ctx.program, ctx.evidence_dtype = program, evidence.dtype
        ctx.save_for_backward(root_logits, inner_logits, tape)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_weights: Tensor) -> tuple[None, Tensor, Tensor, Tensor]:
        root_logits, inner_logits, tape = ctx.saved_tensors
        batch, m, r = grad_weights.shape
        evidence = torch.empty(batch, m, r, dtype=torch.float32, device=grad_weights.device)
        root = evidence.new_empty(batch, r)
        inner = evidence.new_zeros(inner_logits.shape)  # zeros: sums of later tokens have no gradient
        if batch:
            inputs = {"root_ptr": root_logits, "inner_ptr": inner_logits, "tape_ptr": tape}
            grads = {"grad_weights_ptr": grad_weights.contiguous(), "grad_evidence_ptr": evidence}
            grads |= {"grad_root_ptr": root, "grad_inner_ptr": inner}
            sizes = {"m": m, "num_inner": inner_logits.shape[1], "num_kept": tape.shape[1]}
            _filter_backward[(batch,)](**inputs, **grads, **sizes, **_options(ctx.program, r, grad_weights.device))
        return None, evidence.to(ctx.evidence_dtype), root.to(root_logits.dtype), inner.to(inner_logits.dtype)


def _forward(
    program: Program, evidence: Tensor, root_logits: Tensor, inner_logits: Tensor, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return log pi [B, m, r] and, with `keep`, the tape [B, N, r] of the instructions of lists 0 to m - 1."""
    batch, m, r = evidence.shape
    options = _options(program, r, evidence.device)
    num_kept = sum(map(len, program[:m]))
    weights = torch.empty(batch, m, r, dtype=torch.float32, device=evidence.device)
    tape = weights.new_empty(batch, num_kept, r) if keep else None
    if batch:
        inputs = {"root_ptr": root_logits, "inner_ptr": inner_logits, "evidence_ptr": evidence}
        sizes = {"m": m, "num_inner": inner_logits.shape[1], "num_kept": num_kept}
        _filter[(batch,)](**inputs, weights_ptr=weights, tape_ptr=tape, **sizes, **options)
    return weights, tape


def _options(program: Program, r: int, device: torch.device) -> dict[str, Any]:
    """The encoded program, and sizes of a launch."""
    table, depth = encode(program, device)
    num_warps = 1 if r <= 16 else 4 if r <= 32 else 16  # with 8 and r = 64 ptxas spills on sm_90
    return {"program_ptr": table, "r": r, "R": triton.next_power_of_2(r), "DEPTH": depth, "num_warps": num_warps}
