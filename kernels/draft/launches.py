"""The kernels of both paths (README.md), that of one launch last, and their functions.

Vectors [R] and the stack are those of `filter.kernel`; a tile is [R, BLOCK], components by tokens. Between launches the
state of a circuit is in memory, [1 + DEPTH, B, R]: weights, then the stack. A part of a conditional is summarised in a
record of 5 + R numbers of one dtype: its best token's noised value, that token, the maximum of log q / T, the sums of
exp(. - maximum) and of its square, the token's evidence.
"""

from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

import triton
import triton.language as tl

from vllm_mtpc.kernels.draft.tiles import add_bias, evidence, load_bias, load_biased, load_leaf, load_out, move_out
from vllm_mtpc.kernels.filter import kernel as machine

RECORD: tl.constexpr = tl.constexpr(5)  # numbers of a record, in addition to one per component
STRIDES = ("leaf_stride", "k_stride", "z_stride", "low_stride", "low_k_stride")  # that depend on the batch or on K


# Arguments of a launch, one object per role. Triton specialises the members of a tuple, so what depends on the batch or
# on K is a parameter of its own: serving would compile again.

# logits [B, K, r, V]; or with components of low rank (`kernels/leaf.py`) [B, K, 1, V] and `out` [K, LOW, V]
Leaf = namedtuple("Leaf", "ptr out_ptr out_k_stride out_stride", defaults=(None, 0, 0))
# of the token before (`kernels/leaf.py`): W1 [V, RANK] and W2 [K, RANK, V]
Bias = namedtuple("Bias", "source_ptr target_ptr k_stride stride", defaults=(None, None, 0, 0))
# evidence of x_1 [B, r] or None; logits of the root [B, r] and of sums [B, F, r, r]
Circuit = namedtuple("Circuit", "evidence_ptr root_ptr inner_ptr program_ptr")
# temperatures [slots], seeds [slots], masks of tokens [B, K, words] or None
Requests = namedtuple("Requests", "temperature_ptr seed_ptr allowed_ptr words")
# conditionals [slots, K, V] or None
Cache = namedtuple("Cache", "ptr stride k_stride", defaults=(None, 0, 0))
# between launches: maxima and sums of blocks [B, K, blocks, R], normalisers [B, K, R], state [1 + DEPTH, B, R], records
Buffers = namedtuple("Buffers", "top_ptr total_ptr norm_ptr state_ptr record_ptr")


class Sizes(NamedTuple):
    """Constants of an instance that reads leaves in tiles [R, BLOCK]."""

    R: int  # components, a power of two
    BLOCK: int  # tokens
    ROWS: int  # requests
    UNIT: int  # of the strides of the leaf
    LOW: int  # rank of the components; 0: the leaf has r rows
    RANK: int  # of the bias; 0: none


@triton.jit
def add_block(tile, top, total):
    """Update maxima and sums of exp(. - maximum) [R] of the rows by the tokens of a tile."""
    new_top = tl.maximum(top, tl.max(tile, axis=1))
    shift = machine.finite(new_top)
    mass = tl.sum(tl.exp(tile - shift[:, None]), axis=1)
    return new_top, total * tl.exp(top - shift) + mass


@triton.jit
def mixture(tile, weights, norm):
    """Return log q [BLOCK] of the tile's tokens; -inf for NaN."""
    x = tl.where(tile > float("-inf"), tile - norm[:, None], float("-inf")) + weights[:, None]
    log_q = machine.log_sum_exp(x, 0)
    return tl.where(log_q > float("-inf"), log_q, float("-inf"))


@triton.jit
def rounded(log_q, cache_ptr):
    """Return log q rounded to the dtype of the cache, in which drafts are scored, as float32."""
    return log_q.to(cache_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def allow(log_q, requests, at, key, mask):
    """Return log q [BLOCK] of tokens `key`, -inf where their bit of row `at` [words] is 0."""
    if requests.allowed_ptr is not None:
        word = tl.load(requests.allowed_ptr + at * requests.words + key // 32, mask=mask, other=0)
        log_q = tl.where((word >> (key % 32)) & 1 != 0, log_q, float("-inf"))
    return log_q


@triton.jit
def id_of(column, map_ptr, mask=None):
    """The token of a column of the leaves; map_ptr, if not None: tokens [columns]."""
    token = column
    if map_ptr is not None:
        token = tl.load(map_ptr + column, mask=mask).to(column.dtype)
    return token


@triton.jit
def add_moments(log_q, scale, top, first, second):
    """Update the moments by the tokens of a block."""
    x = log_q * scale
    new_top = tl.maximum(top, tl.max(x, axis=0))
    shift = machine.finite(new_top)
    mass = tl.exp(x - shift)
    old = tl.exp(top - shift)
    return new_top, first * old + tl.sum(mass, axis=0), second * old * old + tl.sum(mass * mass, axis=0)


@triton.jit
def confidence(first, second, temperature, DRAW: tl.constexpr):
    """sum_v q_T(v)^2 of a sampled draft, max_v q_T(v) of an argmax; 0 without mass."""
    value = 1.0 / first
    if DRAW:
        value = tl.where(temperature > 0.0, second / (first * first), value)
    return tl.where(first > 0.0, value, 0.0)


@triton.jit
def request(requests, slot_ptr, pos_ptr, row, DRAW: tl.constexpr):
    """Slot (-1: a padded row), temperature of the noise, 1 / temperature of the confidence, seed, position."""
    slot = tl.load(slot_ptr + row).to(tl.int64)
    temperature = tl.load(requests.temperature_ptr + slot, mask=slot >= 0, other=0.0).to(tl.float32)
    seed = tl.load(requests.seed_ptr + slot, mask=slot >= 0, other=0)
    scale = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
    if not DRAW:
        temperature = temperature * 0.0
    return slot, temperature, scale, seed, tl.load(pos_ptr + row).to(tl.int64)


@triton.jit
def start(circuit, message, inner_ptr, row, r, R: tl.constexpr, DEPTH: tl.constexpr):
    """Weights [R] and stack at the first draft, conditioned on x_1 by its evidence; inner_ptr: of the row."""
    weights = machine.normalise(machine.load_vector(circuit.root_ptr + row * r, r, R))
    stack = tl.full([DEPTH, R], float("-inf"), tl.float32)
    for k in range(2):
        weights, stack = machine.advance(circuit.program_ptr, k, weights, stack, message, inner_ptr, r, R, DEPTH)
    return weights, stack


@triton.jit
def state_at(state_ptr, row, num_rows, R: tl.constexpr, DEPTH: tl.constexpr):
    """Pointers to the weights [R] and the stack [DEPTH, R] of a row."""
    weights = state_ptr + row * R + tl.arange(0, R)
    return weights, weights[None, :] + (1 + tl.arange(0, DEPTH)[:, None]).to(tl.int64) * num_rows * R


@triton.jit
def keep_record(record_ptr, value, token, top, first, second, message, R: tl.constexpr):
    """Store a record [5 + R]."""
    tl.store(record_ptr, value)
    tl.store(record_ptr + 1, token)
    tl.store(record_ptr + 2, top)
    tl.store(record_ptr + 3, first)
    tl.store(record_ptr + 4, second)
    tl.store(record_ptr + RECORD + tl.arange(0, R), message)


@triton.jit
def best(record_ptr, count, row, num_rows, R: tl.constexpr, COUNT: tl.constexpr):
    """The record with the largest value of a row's [count, num_rows, 5 + R], and the moments of all."""
    part = tl.arange(0, COUNT)
    mask = part < count
    at = record_ptr + (part.to(tl.int64) * num_rows + row) * (RECORD + R)
    _, winner = tl.max(tl.load(at, mask=mask, other=float("-inf")), axis=0, return_indices=True)
    tops = tl.load(at + 2, mask=mask, other=float("-inf")).to(tl.float32)
    top = tl.max(tops, axis=0)
    old = tl.exp(tops - machine.finite(top))
    first = tl.sum(old * tl.load(at + 3, mask=mask, other=0.0).to(tl.float32), axis=0)
    second = tl.sum(old * old * tl.load(at + 4, mask=mask, other=0.0).to(tl.float32), axis=0)
    return record_ptr + (winner.to(tl.int64) * num_rows + row) * (RECORD + R), top, first, second


@triton.jit(
    do_not_specialize=[*STRIDES, "before_stride", "num_drafts", "draft", "batch"],
    do_not_specialize_on_alignment=["low_ptr", "before_ptr"],
)
def leaf_blocks(
    leaf, leaf_stride, k_stride, z_stride, low_ptr, low_stride, low_k_stride,
    bias, before_ptr, before_stride, buffers, draft, num_drafts, batch, r, vocab_size, sizes: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of every component in one block of one leaf of ROWS requests.

    RANK > 0: the only leaf is that of `draft`, with the bias of the tokens before_ptr [B].
    """
    group, block, place = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    R: tl.constexpr = sizes.R
    k = (place if sizes.RANK == 0 else draft).to(tl.int64)
    token = block * sizes.BLOCK + tl.arange(0, sizes.BLOCK)
    z_stride = z_stride.to(tl.int64) * sizes.UNIT
    out_ptr = move_out(leaf, k, sizes.LOW)
    out = load_out(out_ptr, leaf.out_stride, 0, token, vocab_size, sizes.LOW)
    terms = load_bias(bias, before_ptr, before_stride, k, group * sizes.ROWS, batch, token, vocab_size, sizes)
    for index in range(sizes.ROWS):
        row = group * sizes.ROWS + index
        if row < batch:
            leaf_ptr = leaf.ptr + (row * leaf_stride + k * k_stride) * sizes.UNIT
            low = low_ptr if sizes.LOW == 0 else low_ptr + row * low_stride + k * low_k_stride
            tile = load_leaf(leaf_ptr, z_stride, low, out_ptr, leaf.out_stride, out, token, vocab_size, r, R, sizes.LOW)
            tile = add_bias(tile, terms, index, sizes.RANK, sizes.ROWS)
            top, total = add_block(tile, tl.full([R], float("-inf"), tl.float32), tl.full([R], 0.0, tl.float32))
            at = ((row * num_drafts + place) * tl.num_programs(1) + block) * R + tl.arange(0, R)
            tl.store(buffers.top_ptr + at, top)
            tl.store(buffers.total_ptr + at, total)


@triton.jit(
    do_not_specialize=[*STRIDES, "num_drafts", "num_inner"], do_not_specialize_on_alignment=["first_ptr", "low_ptr"]
)
def start_rows(
    leaf, leaf_stride, k_stride, z_stride, low_ptr, low_stride, low_k_stride,
    circuit, first_ptr, buffers, num_drafts, num_inner, r, num_blocks,
    R: tl.constexpr, DEPTH: tl.constexpr, CHUNK: tl.constexpr, START: tl.constexpr, UNIT: tl.constexpr,
    LOW: tl.constexpr,
):  # fmt: skip
    """Normalisers [R] of one leaf from those of its blocks; START: also the state at the first draft.

    Without evidence the leaf is that of x_1 = first_ptr [B].
    """
    k, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    z = tl.arange(0, R)
    top, total = tl.full([R], float("-inf"), tl.float32), tl.full([R], 0.0, tl.float32)
    for first in range(0, num_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)[:, None]
        at = ((row * num_drafts + k) * num_blocks + block) * R + z[None, :]
        tops = tl.load(buffers.top_ptr + at, mask=block < num_blocks, other=float("-inf"))
        totals = tl.load(buffers.total_ptr + at, mask=block < num_blocks, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        shift = machine.finite(new_top)
        total = total * tl.exp(top - shift) + tl.sum(totals * tl.exp(tops - shift[None, :]), axis=0)
        top = new_top
    norm = machine.finite(top) + tl.log(total)
    tl.store(buffers.norm_ptr + (row * num_drafts + k) * R + z, norm)
    if START and k == 0:
        if circuit.evidence_ptr is None:
            leaf_ptr, stride = leaf.ptr + row * leaf_stride * UNIT, z_stride.to(tl.int64) * UNIT
            low = low_ptr if LOW == 0 else low_ptr + row * low_stride
            token = tl.load(first_ptr + row)
            message = evidence(leaf_ptr, stride, low, leaf.out_ptr, leaf.out_stride, token, norm, r, R, LOW)
        else:
            message = machine.load_vector(circuit.evidence_ptr + row * r, r, R)
        inner_ptr = circuit.inner_ptr + row * num_inner * r * r
        weights, stack = start(circuit, message, inner_ptr, row, r, R, DEPTH)
        weights_at, stack_at = state_at(buffers.state_ptr, row, tl.num_programs(1), R, DEPTH)
        tl.store(weights_at, weights)
        tl.store(stack_at, stack)


@triton.jit(
    do_not_specialize=[*STRIDES, "before_stride", "k", "num_drafts", "batch"],
    do_not_specialize_on_alignment=["slot_ptr", "pos_ptr", "low_ptr", "before_ptr"],
)
def draft_blocks(
    leaf, leaf_stride, k_stride, z_stride, low_ptr, low_stride, low_k_stride,
    bias, before_ptr, before_stride, buffers, requests, slot_ptr, pos_ptr, cache,
    k, num_drafts, batch, r, vocab_size, map_ptr,
    NOISED_ARGMAX: tl.constexpr, DRAW: tl.constexpr, USE_FP64: tl.constexpr, sizes: tl.constexpr,
):  # fmt: skip
    """Write one block of draft k's conditionals of ROWS requests to the cache, and their records [blocks, B, 5 + R].

    map_ptr, if not None: the tokens of the leaf's columns, which are those of `token` here.
    RANK > 0: with the bias of the tokens before_ptr [B]; normalisers are those of this draft.
    """
    group, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    R: tl.constexpr = sizes.R
    z, token = tl.arange(0, R), block * sizes.BLOCK + tl.arange(0, sizes.BLOCK)
    mask = token < vocab_size
    key = id_of(token, map_ptr, mask)
    z_stride = z_stride.to(tl.int64) * sizes.UNIT
    out_ptr = move_out(leaf, k.to(tl.int64), sizes.LOW)
    out = load_out(out_ptr, leaf.out_stride, 0, token, vocab_size, sizes.LOW)
    terms = load_bias(bias, before_ptr, before_stride, k, group * sizes.ROWS, batch, token, vocab_size, sizes)
    for number in range(sizes.ROWS):
        row = group * sizes.ROWS + number
        if row < batch:
            slot, temperature, scale, seed, pos = request(requests, slot_ptr, pos_ptr, row, DRAW)
            weights = tl.load(buffers.state_ptr + row * R + z)
            norm = tl.load(buffers.norm_ptr + (row * num_drafts + k if sizes.RANK == 0 else row) * R + z)
            leaf_ptr = leaf.ptr + (row * leaf_stride + k.to(tl.int64) * k_stride) * sizes.UNIT
            low = low_ptr if sizes.LOW == 0 else low_ptr + row * low_stride + k.to(tl.int64) * low_k_stride
            tile = load_leaf(leaf_ptr, z_stride, low, out_ptr, leaf.out_stride, out, token, vocab_size, r, R, sizes.LOW)
            tile = add_bias(tile, terms, number, sizes.RANK, sizes.ROWS)
            log_q = allow(mixture(tile, weights, norm), requests, row * num_drafts + k, key, mask)
            if cache.ptr is not None:
                log_q = rounded(log_q, cache.ptr)
                cached = cache.ptr + slot * cache.stride + k.to(tl.int64) * cache.k_stride
                tl.store(cached + key, log_q, mask=mask & (slot >= 0))
            none = tl.full([], 0.0, tl.float32)
            top, first, second = add_moments(log_q, scale, none + float("-inf"), none, none)
            value, index = NOISED_ARGMAX(
                log_q, key, mask, seed, pos + k, temperature, IS_DRAFTING=False, USE_FP64=USE_FP64
            )
            chosen = block * sizes.BLOCK + index
            message = evidence(leaf_ptr, z_stride, low, out_ptr, leaf.out_stride, chosen, norm, r, R, sizes.LOW)
            at = buffers.record_ptr + (block * batch + row) * (RECORD + R)
            keep_record(at, value, id_of(chosen, map_ptr), top, first, second, message, R)


@triton.jit(
    do_not_specialize=["k", "num_drafts", "num_inner"],
    do_not_specialize_on_alignment=["slot_ptr", "token_ptr", "confidence_ptr"],
)
def choose(
    record_ptr, state_ptr, inner_ptr, program_ptr, slot_ptr, temperature_ptr,
    token_ptr, token_stride, confidence_ptr, confidence_stride, k, num_drafts, num_inner, r, count,
    DRAW: tl.constexpr, R: tl.constexpr, DEPTH: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Write draft k and its confidence from the records of all blocks, and the state at draft k + 1."""
    row = tl.program_id(0).to(tl.int64)
    at, _, first, second = best(record_ptr, count, row, tl.num_programs(0), R, COUNT)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot, mask=slot >= 0, other=0.0)
    tl.store(token_ptr + row * token_stride + k, tl.load(at + 1).to(tl.int64))
    tl.store(confidence_ptr + row * confidence_stride + k, confidence(first, second, temperature, DRAW))
    if k + 1 < num_drafts:
        message = tl.load(at + RECORD + tl.arange(0, R)).to(tl.float32)
        inner_ptr += row * num_inner * r * r
        weights_at, stack_at = state_at(state_ptr, row, tl.num_programs(0), R, DEPTH)
        weights, stack = tl.load(weights_at), tl.load(stack_at)
        weights, stack = machine.advance(program_ptr, k + 2, weights, stack, message, inner_ptr, r, R, DEPTH)
        tl.store(weights_at, weights)
        tl.store(stack_at, stack)


@triton.jit(
    do_not_specialize=["leaf_stride", "k_stride", "z_stride", "num_drafts", "num_inner"],
    do_not_specialize_on_alignment=["slot_ptr", "pos_ptr", "token_ptr", "confidence_ptr", "first_ptr"],
)
def draft_rows(
    leaf, leaf_stride, k_stride, z_stride, first_ptr, bias, circuit, requests, slot_ptr, pos_ptr,
    token_ptr, token_stride, confidence_ptr, confidence_stride, cache, num_drafts, num_inner, r, vocab_size, map_ptr,
    NOISED_ARGMAX: tl.constexpr, DRAW: tl.constexpr, USE_FP64: tl.constexpr, sizes: tl.constexpr,
    DEPTH: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """All drafts of one request; a leaf of one block is read once and stays in registers.

    map_ptr, if not None: the tokens of the leaf's columns, which are those of `token` here.
    """
    row = tl.program_id(0).to(tl.int64)
    R: tl.constexpr = sizes.R
    slot, temperature, scale, seed, pos = request(requests, slot_ptr, pos_ptr, row, DRAW)
    inner_ptr = circuit.inner_ptr + row * num_inner * r * r
    message = machine.load_vector(circuit.evidence_ptr + row * r, r, R)
    weights, stack = start(circuit, message, inner_ptr, row, r, R, DEPTH)
    first_leaf = leaf.ptr + row * leaf_stride * sizes.UNIT
    z_stride *= sizes.UNIT
    in_block = tl.arange(0, sizes.BLOCK)
    if sizes.RANK > 0:
        before = tl.load(first_ptr + row).to(tl.int64)
    for k in range(num_drafts):
        leaf_ptr = first_leaf + k * k_stride * sizes.UNIT
        source, target = bias.source_ptr, bias.target_ptr
        if sizes.RANK > 0:
            source += before * sizes.RANK
            target += bias.k_stride.to(tl.int64) * k
        top = tl.full([R], float("-inf"), tl.float32)
        total = tl.full([R], 0.0, tl.float32)
        if BLOCKS == 1:
            tile = load_biased(leaf_ptr, z_stride, source, target, bias.stride, in_block, vocab_size, r, CHUNK, sizes)
            top, total = add_block(tile, top, total)
        else:
            for block in range(BLOCKS):
                token = block * sizes.BLOCK + in_block
                tile = load_biased(leaf_ptr, z_stride, source, target, bias.stride, token, vocab_size, r, CHUNK, sizes)
                top, total = add_block(tile, top, total)
        norm = machine.finite(top) + tl.log(total)

        largest = tl.full([], float("-inf"), tl.float64 if USE_FP64 else tl.float32)
        chosen = tl.full([], 0, tl.int64)
        q_top = tl.full([], float("-inf"), tl.float32)
        first, second = tl.full([], 0.0, tl.float32), tl.full([], 0.0, tl.float32)
        for block in range(BLOCKS):
            token = block * sizes.BLOCK + in_block
            if BLOCKS > 1:
                tile = load_biased(leaf_ptr, z_stride, source, target, bias.stride, token, vocab_size, r, CHUNK, sizes)
            mask = token < vocab_size
            key = id_of(token, map_ptr, mask)
            log_q = allow(mixture(tile, weights, norm), requests, row * num_drafts + k, key, mask)
            if cache.ptr is not None:
                log_q = rounded(log_q, cache.ptr)
                cached = cache.ptr + slot * cache.stride + k * cache.k_stride
                tl.store(cached + key, log_q, mask=mask & (slot >= 0))
            q_top, first, second = add_moments(log_q, scale, q_top, first, second)
            value, index = NOISED_ARGMAX(
                log_q, key, mask, seed, pos + k, temperature, IS_DRAFTING=False, USE_FP64=USE_FP64
            )
            is_better = value > largest
            largest = tl.where(is_better, value, largest)
            chosen = tl.where(is_better, (block * sizes.BLOCK + index).to(tl.int64), chosen)

        drafted = id_of(chosen, map_ptr)
        tl.store(token_ptr + row * token_stride + k, drafted)
        tl.store(confidence_ptr + row * confidence_stride + k, confidence(first, second, temperature, DRAW))
        if k + 1 < num_drafts:
            message = evidence(leaf_ptr, z_stride, None, None, None, chosen, norm, r, R, 0)
            if sizes.RANK > 0:
                before = drafted
            weights, stack = machine.advance(
                circuit.program_ptr, k + 2, weights, stack, message, inner_ptr, r, R, DEPTH
            )
