"""What both paths of the draft kernel are made of: a leaf's tiles, mixtures, moments; the start of a circuit.

Vectors [R] and the stack are those of `kernels.filter.machine`; a tile is [R, BLOCK], components by tokens. Strides of
a leaf are given to the kernels in multiples of UNIT (`kernel._strided`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_mtpc.kernels.filter import machine


@triton.jit
def tile(leaf_ptr, z_stride, token, vocab_size, r, R: tl.constexpr):
    """Logits [R, BLOCK] of tokens [BLOCK], float32: -inf beyond the vocabulary, 0 in the rows beyond r."""
    z = tl.arange(0, R)
    inside = (z[:, None] < r) & (token[None, :] < vocab_size)
    offset = z[:, None].to(tl.int64) * z_stride + token[None, :]
    x = tl.load(leaf_ptr + offset, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(z[:, None] < r, x, 0.0)


@triton.jit
def finite(top):
    """What to subtract before exp, where the largest is `top`."""
    return tl.where(top > float("-inf"), top, 0.0)


@triton.jit
def add_block(tile, top, total):
    """Maxima and sums of exp(. - maximum) [R] of the rows, with the tile's tokens among them."""
    new_top = tl.maximum(top, tl.max(tile, axis=1))
    shift = finite(new_top)
    mass = tl.sum(tl.exp(tile - shift[:, None]), axis=1)
    return new_top, total * tl.exp(top - shift) + mass


@triton.jit
def mixture(tile, weights, norm):
    """log q [BLOCK] of the tile's tokens; -inf where it is not a number."""
    x = tl.where(tile > float("-inf"), tile - norm[:, None], float("-inf")) + weights[:, None]
    log_q = machine.log_sum_exp(x, 0)
    return tl.where(log_q > float("-inf"), log_q, float("-inf"))


@triton.jit
def rounded(log_q, cache_ptr):
    """log q as the cache holds it, float32: with what is stored the draft is scored, so from that it is drawn."""
    return log_q.to(cache_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def add_moments(log_q, scale, top, first, second):
    """Maximum of log q / T, sum of exp(. - maximum) and of its square, with the block's tokens among them."""
    x = log_q * scale
    new_top = tl.maximum(top, tl.max(x, axis=0))
    shift = finite(new_top)
    mass = tl.exp(x - shift)
    old = tl.exp(top - shift)
    return new_top, first * old + tl.sum(mass, axis=0), second * old * old + tl.sum(mass * mass, axis=0)


@triton.jit
def confidence(first, second, temperature, DRAW: tl.constexpr):
    """sum_v q_T(v)^2 of a draft that is drawn, max_v q_T(v) of one that is the argmax; 0 without any mass."""
    value = 1.0 / first
    if DRAW:
        value = tl.where(temperature > 0.0, second / (first * first), value)
    return tl.where(first > 0.0, value, 0.0)


@triton.jit
def request(slot_ptr, temperature_ptr, seed_ptr, pos_ptr, row, DRAW: tl.constexpr):
    """Slot (-1: a padded row), temperature of the noise, 1 / temperature of the confidence, seed, position."""
    slot = tl.load(slot_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    seed = tl.load(seed_ptr + slot, mask=slot >= 0, other=0)
    scale = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
    if not DRAW:
        temperature = temperature * 0.0
    return slot, temperature, scale, seed, tl.load(pos_ptr + row).to(tl.int64)


@triton.jit
def evidence(leaf_ptr, z_stride, token, norm, r, R: tl.constexpr):
    """log p(token | z) [R], finite beyond r."""
    z = tl.arange(0, R)
    x = tl.load(leaf_ptr + z.to(tl.int64) * z_stride + token, mask=z < r, other=0.0).to(tl.float32)
    return tl.where(x > float("-inf"), x - norm, float("-inf"))


@triton.jit
def start(
    evidence_ptr, root_ptr, inner_ptr, code_ptr, begins_ptr, row, num_inner, r, R: tl.constexpr, DEPTH: tl.constexpr
):
    """Weights [R], stack and its depth at the first draft, once the verifier's token was seen."""
    z = tl.arange(0, R)
    message = tl.load(evidence_ptr + row * r + z, mask=z < r, other=0.0).to(tl.float32)
    weights = machine.normalise(machine.load_vector(root_ptr + row * r, r, R))
    stack = tl.full([DEPTH, R], float("-inf"), tl.float32)
    depth = tl.full([], 0, tl.int32)
    inner_ptr += row * num_inner * r * r
    for k in range(2):
        weights, stack, depth = machine.advance(
            code_ptr, begins_ptr, k, weights, stack, depth, message, inner_ptr, r, R, DEPTH
        )
    return weights, stack, depth


@triton.jit
def total(top_ptr, first_ptr, second_ptr, mask):
    """The moments of parts of a vocabulary put together: maximum, sum of exp(. - maximum) and of its square."""
    tops = tl.load(top_ptr, mask=mask, other=float("-inf")).to(tl.float32)
    top = tl.max(tops, axis=0)
    old = tl.exp(tops - finite(top))
    first = tl.sum(old * tl.load(first_ptr, mask=mask, other=0.0).to(tl.float32), axis=0)
    second = tl.sum(old * old * tl.load(second_ptr, mask=mask, other=0.0).to(tl.float32), axis=0)
    return top, first, second


@triton.jit
def best(value_ptr, index_ptr, moments_ptr, row, num_blocks, BLOCKS: tl.constexpr):
    """Of the blocks of a conditional: the largest noised value, its token, the moments of all of them."""
    blocks = tl.arange(0, BLOCKS)
    mask = blocks < num_blocks
    at = row * num_blocks + blocks
    value, block = tl.max(tl.load(value_ptr + at, mask=mask, other=float("-inf")), axis=0, return_indices=True)
    token = tl.load(index_ptr + row * num_blocks + block).to(tl.int64)
    moments_ptr += 3 * at
    top, first, second = total(moments_ptr, moments_ptr + 1, moments_ptr + 2, mask)
    return value, token, top, first, second


@triton.jit
def keep(token_ptr, confidence_ptr, token, first, second, slot_ptr, temperature_ptr, DRAW: tl.constexpr):
    """A draft and its confidence, written down."""
    slot = tl.load(slot_ptr).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0)
    tl.store(token_ptr, token)
    tl.store(confidence_ptr, confidence(first, second, temperature, DRAW))


@triton.jit
def step(
    code_ptr,
    begins_ptr,
    weights_ptr,
    stack_ptr,
    depth_ptr,
    row,
    k,
    message,
    inner_ptr,
    r,
    R: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """A circuit's state in memory, from draft k to draft k + 1."""
    z = tl.arange(0, R)
    weights_ptr += row * R + z
    stack_ptr += (row * DEPTH + tl.arange(0, DEPTH)[:, None]) * R + z[None, :]
    depth_ptr += row
    weights, stack, depth = machine.advance(
        code_ptr,
        begins_ptr,
        k + 2,
        tl.load(weights_ptr),
        tl.load(stack_ptr),
        tl.load(depth_ptr),
        message,
        inner_ptr,
        r,
        R,
        DEPTH,
    )
    tl.store(weights_ptr, weights)
    tl.store(stack_ptr, stack)
    tl.store(depth_ptr, depth)
