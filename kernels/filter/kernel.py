"""`naive.filter_weights` in Triton, with its backward: one launch each, one program instance per circuit.

Forward runs the machine of `machine.py` and, where a gradient is asked for, keeps a tape: one vector per instruction.
Backward runs the instructions in reverse on the adjoints of the machine's registers; README.md derives it. Nothing is
summed across instances: both are deterministic, and a circuit's result does not depend on its batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from vllm_mtpc.kernels.filter.machine import (
    CONDITION,
    PUSH,
    TRANSITION,
    UPWARD,
    advance,
    encode,
    load_sum,
    load_vector,
    log_sum_exp,
    normalise,
    push,
)
from vllm_mtpc.kernels.filter.program import CHANGE, Program


@triton.jit(do_not_specialize=["m", "num_inner", "num_kept"])
def _filter(
    code_ptr,
    begins_ptr,
    evidence_ptr,
    root_ptr,
    inner_ptr,
    weights_ptr,
    tape_ptr,
    m,
    r,
    num_inner,
    num_kept,
    R: tl.constexpr,
    DEPTH: tl.constexpr,
):
    circuit = tl.program_id(0).to(tl.int64)
    evidence_ptr += circuit * m * r
    inner_ptr += circuit * num_inner * r * r
    weights_ptr += circuit * m * r
    if tape_ptr is not None:
        tape_ptr += circuit * num_kept * r
    z = tl.arange(0, R)
    weights = normalise(load_vector(root_ptr + circuit * r, r, R))
    stack = tl.full([DEPTH, R], float("-inf"), tl.float32)
    depth = tl.full([], 0, tl.int32)
    message = weights  # the first list reads none
    for k in range(m):
        weights, stack, depth = advance(
            code_ptr, begins_ptr, k, weights, stack, depth, message, inner_ptr, r, R, DEPTH, tape_ptr
        )
        tl.store(weights_ptr + k * r + z, weights, mask=z < r)
        message = load_vector(evidence_ptr + k * r, r, R)


@triton.jit
def _load_adjoint(ptr, r, R: tl.constexpr):
    z = tl.arange(0, R)
    return tl.load(ptr + z, mask=z < r, other=0.0).to(tl.float32)


@triton.jit
def _pop_adjoint(stack, top, DEPTH: tl.constexpr):
    rows = tl.arange(0, DEPTH)
    return tl.sum(tl.where(rows[:, None] == top, stack, 0.0), axis=0)


@triton.jit
def _through_softmax(adjoint, log_probs, axis: tl.constexpr):
    """From the adjoint of log_softmax(x) along an axis to that of x."""
    return adjoint - tl.exp(log_probs) * tl.expand_dims(tl.sum(adjoint, axis=axis), axis)


@triton.jit
def _share(terms, total):
    """exp(terms - total), the share of each term in its sum; 0 where the sum has no mass."""
    return tl.where(total == float("-inf"), 0.0, tl.exp(terms - total))


@triton.jit
def _add_sum_gradient(grad_ptr, index, adjoint, log_probs, r, R: tl.constexpr):
    """To the gradient [F, r, r] of the logits of inner sums, from the adjoint [R, R] of the rows of one.

    A sum with a TRANSITION and an UPWARD is written twice, here and there by the same instance: hence the barrier.
    """
    z = tl.arange(0, R)
    mask = (z[:, None] < r) & (z[None, :] < r)
    at = grad_ptr + index.to(tl.int64) * r * r + z[:, None] * r + z[None, :]
    tl.debug_barrier()
    before = tl.load(at, mask=mask, other=0.0)
    tl.store(at, before + _through_softmax(adjoint, log_probs, 1), mask=mask)


@triton.jit
def _retreat(
    code_ptr,
    begins_ptr,
    k,
    weights,
    stack,
    depth,
    inner_ptr,
    grad_inner_ptr,
    tape_ptr,
    r,
    R: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Adjoints of weights, stack and message before list k of the program, from those of weights and stack after."""
    message = tl.zeros([R], tl.float32)
    end = tl.load(begins_ptr + k + 1)
    for back in range(end - tl.load(begins_ptr + k)):
        at = end - 1 - back
        op = tl.load(code_ptr + 2 * at)
        index = tl.load(code_ptr + 2 * at + 1)
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
            depth -= 1
            weights += _pop_adjoint(stack, depth, DEPTH)
        elif op == UPWARD:
            log_probs = load_sum(inner_ptr, index, r, R)
            terms = log_probs + kept[None, :]
            adjoint = _share(terms, log_sum_exp(terms, 1)[:, None]) * message[:, None]
            _add_sum_gradient(grad_inner_ptr, index, adjoint, log_probs, r, R)
            message = tl.sum(adjoint, axis=0)
            stack = push(stack, depth, message, DEPTH)
            depth += 1
        else:
            given = _pop_adjoint(stack, depth - 1, DEPTH)
            opened = _through_softmax(weights, kept, 0)
            stack = push(stack, depth - 1, opened, DEPTH)
            message += given + opened
            weights = tl.zeros([R], tl.float32)  # those before the sibling end there
    return weights, stack, depth, message


@triton.jit(do_not_specialize=["m", "num_inner", "num_kept", "depth"])
def _filter_backward(
    code_ptr,
    begins_ptr,
    root_ptr,
    inner_ptr,
    tape_ptr,
    grad_weights_ptr,
    grad_evidence_ptr,
    grad_root_ptr,
    grad_inner_ptr,
    m,
    r,
    num_inner,
    num_kept,
    depth,
    R: tl.constexpr,
    DEPTH: tl.constexpr,
):
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
    depth += tl.full([], 0, tl.int32)
    for back in range(m):
        k = m - 1 - back
        tl.store(grad_evidence_ptr + k * r + z, message, mask=z < r)
        weights += _load_adjoint(grad_weights_ptr + k * r, r, R)
        weights, stack, depth, message = _retreat(
            code_ptr, begins_ptr, k, weights, stack, depth, inner_ptr, grad_inner_ptr, tape_ptr, r, R, DEPTH
        )
    root = normalise(load_vector(root_ptr + circuit * r, r, R))
    tl.store(grad_root_ptr + circuit * r + z, _through_softmax(weights, root, 0), mask=z < r)


def filter_weights(program: Program, evidence: Tensor, root_logits: Tensor, inner_logits: Tensor) -> Tensor:
    """As `naive.filter_weights`, r <= 64; half precisions are read as float32, gradients have their input's dtype."""
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
        evidence, root, inner = _backward(ctx.program, root_logits, inner_logits, tape, grad_weights.contiguous())
        return None, evidence.to(ctx.evidence_dtype), root.to(root_logits.dtype), inner.to(inner_logits.dtype)


def _forward(
    program: Program, evidence: Tensor, root_logits: Tensor, inner_logits: Tensor, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """log pi [B, m, r] and, where asked for, the tape [B, N, r], N instructions of lists 0 to m - 1; float32."""
    batch, m, r = evidence.shape
    code, begins, slots = encode(program, evidence.device)
    num_kept = sum(map(len, program[:m]))
    weights = torch.empty(batch, m, r, dtype=torch.float32, device=evidence.device)
    tape = weights.new_empty(batch, num_kept, r) if keep else None
    if batch:
        _filter[(batch,)](
            code,
            begins,
            evidence,
            root_logits,
            inner_logits,
            weights,
            tape,
            m,
            r,
            inner_logits.shape[1],
            num_kept,
            R=triton.next_power_of_2(r),
            DEPTH=slots,
            num_warps=_num_warps(r),
        )
    return weights, tape


def _backward(
    program: Program, root_logits: Tensor, inner_logits: Tensor, tape: Tensor, grad_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of evidence [B, m, r], root logits [B, r] and inner logits [B, F, r, r], float32."""
    batch, m, r = grad_weights.shape
    code, begins, slots = encode(program, grad_weights.device)
    grad_evidence = torch.empty(batch, m, r, dtype=torch.float32, device=grad_weights.device)
    grad_root = grad_evidence.new_empty(batch, r)
    grad_inner = grad_evidence.new_zeros(inner_logits.shape)  # sums of later tokens are not reached
    if batch:
        _filter_backward[(batch,)](
            code,
            begins,
            root_logits,
            inner_logits,
            tape,
            grad_weights,
            grad_evidence,
            grad_root,
            grad_inner,
            m,
            r,
            inner_logits.shape[1],
            tape.shape[1],
            sum(CHANGE.get(op, 0) for instructions in program[:m] for op, _ in instructions),
            R=triton.next_power_of_2(r),
            DEPTH=slots,
            num_warps=_num_warps(r),
        )
    return grad_evidence, grad_root, grad_inner


def _num_warps(r: int) -> int:
    """Warps of an instance: at most 8 values of a tile [R, R] per thread; with 16 of r = 64 ptxas spills on sm_80."""
    return 1 if r <= 16 else 4 if r <= 32 else 16
