"""`naive.pick` and `naive.select_tokens` in Triton (README.md).

Masses are summed by blocks of the vocabulary; then each row's block, by u or by its largest logit, and the token in it
are found. With trust every token is rated, P(v | u), and the best of the blocks' best is taken.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mtpc.kernels.uniform.kernel import uniform_kernel

BLOCK = 4096
STATE = ("slot_ptr", "pos_ptr", "seed_ptr", "temperature_ptr")
RATED = 1024  # tokens of a program that rates them: they are float64
_HALF_STEP = tl.constexpr(2.0**-25)  # u is taken as the middle of its cell [u, u + 2^-24)


@triton.jit
def ndtri(p):
    """Return the x with ndtr(x) = p, of p float64; -inf at 0 and below, inf at 1 and above.

    PyTorch compiles its own with NVRTC on a GPU. This one is Acklam's (2003), with a relative error below 1.2e-9.
    """
    q, tail = p - 0.5, tl.minimum(p, 1.0 - p)
    r = q * q
    above = (((-39.69683028665376 * r + 220.9460984245205) * r - 275.9285104469687) * r + 138.3577518672690) * r
    above = (above - 30.66479806614716) * r + 2.506628277459239
    below = (((-54.47609879822406 * r + 161.5858368580409) * r - 155.6989798598866) * r + 66.80131188771972) * r
    central = q * above / ((below - 13.28068155288572) * r + 1.0)
    s = tl.sqrt(-2.0 * tl.log(tl.where(tail > 0.0, tail, 0.5)))
    above = ((-7.784894002430293e-3 * s - 0.3223964580411365) * s - 2.400758277161838) * s - 2.549732539343734
    below = ((7.784695709041462e-3 * s + 0.3224671290700398) * s + 2.445134137142996) * s + 3.754408661907416
    outer = ((above * s + 4.374664141464968) * s + 2.938163982698783) / (below * s + 1.0)
    outer = tl.where(tail > 0.0, outer, float("-inf"))
    return tl.where(tail > 0.02425, central, tl.where(q < 0.0, outer, -outer))


@triton.jit
def ndtr(x):
    """Return the standard normal's distribution function at x float64; absolute error about 1e-16."""
    return 0.5 + 0.5 * tl.erf(x * 0.70710678118654752440)


@triton.jit
def _first_over(mass, threshold, SIZE: tl.constexpr):
    """The first index with mass at which the running sum exceeds `threshold`; else the last with mass; else -1."""
    index = tl.arange(0, SIZE)
    has_mass = mass > 0.0
    over = has_mass & (tl.cumsum(mass, axis=0) > threshold)
    first = tl.min(tl.where(over, index, SIZE), axis=0)
    last = tl.max(tl.where(has_mass, index, -1), axis=0)
    return tl.minimum(first, last)


@triton.jit
def _sum_blocks(logits_ptr, row_stride, top_ptr, sum_ptr, vocab_size, BLOCK: tl.constexpr):
    row, block, num_blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    x = tl.where(x > float("-inf"), x, float("-inf"))  # NaN
    top = tl.max(x, axis=0)
    mass = tl.where(x > float("-inf"), tl.exp(x - top), 0.0)
    tl.store(top_ptr + row * num_blocks + block, top)
    tl.store(sum_ptr + row * num_blocks + block, tl.sum(mass.to(tl.float64), axis=0))


@triton.jit
def _load_block_sums(top_ptr, sum_ptr, row, num_blocks, BLOCKS: tl.constexpr):
    """Return index, largest logit, exp(largest logit - that of the row) and mass of each block [BLOCKS]."""
    blocks = tl.arange(0, BLOCKS)
    mask = blocks < num_blocks
    tops = tl.load(top_ptr + row * num_blocks + blocks, mask=mask, other=float("-inf"))
    sums = tl.load(sum_ptr + row * num_blocks + blocks, mask=mask, other=0.0)
    scale = tl.where(tops > float("-inf"), tl.exp((tops - tl.max(tops, axis=0)).to(tl.float64)), 0.0)
    return blocks, tops, scale, sums * scale


@triton.jit
def _load_u(slot_ptr, pos_ptr, seed_ptr, temperature_ptr, row):
    """Return the u of a row's token, and whether its request is greedy."""
    slot = tl.load(slot_ptr + row).to(tl.int64)
    u = uniform_kernel(tl.load(seed_ptr + slot).to(tl.int64), tl.load(pos_ptr + row).to(tl.int64))
    return u, tl.load(temperature_ptr + slot) == 0.0


@triton.jit
def _pick_rows(
    logits_ptr, row_stride, u_ptr, slot_ptr, pos_ptr, seed_ptr, temperature_ptr, top_ptr, sum_ptr, token_ptr,
    vocab_size, HAS_U: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    blocks, tops, scale, mass = _load_block_sums(top_ptr, sum_ptr, row, (vocab_size + BLOCK - 1) // BLOCK, BLOCKS)
    if HAS_U:
        u = tl.load(u_ptr + row)
    else:
        u, is_greedy = _load_u(slot_ptr, pos_ptr, seed_ptr, temperature_ptr, row)
    threshold = u.to(tl.float64) * tl.sum(mass, axis=0)
    block = _first_over(mass, threshold, BLOCKS)
    if not HAS_U:
        block = tl.where(is_greedy, tl.argmax(tops, axis=0), block)

    is_chosen = blocks == block
    top = tl.max(tl.where(is_chosen, tops, float("-inf")), axis=0)
    before = tl.sum(tl.where(blocks < block, mass, 0.0), axis=0)
    within = (threshold - before) / tl.sum(tl.where(is_chosen, scale, 0.0), axis=0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    mask = (token >= 0) & (token < vocab_size)
    x = tl.load(logits_ptr + row * row_stride + token, mask=mask, other=float("-inf")).to(tl.float32)
    in_block = tl.where(x > float("-inf"), tl.exp(x - top), 0.0)
    index = _first_over(in_block.to(tl.float64), within, BLOCK)
    if not HAS_U:
        index = tl.where(is_greedy, tl.min(tl.where(x == top, tl.arange(0, BLOCK), BLOCK), axis=0), index)
    tl.store(token_ptr + row, tl.where(index < 0, vocab_size - 1, block * BLOCK + index).to(tl.int64))


@triton.jit
def _rate_blocks(
    logits_ptr, row_stride, slot_ptr, pos_ptr, seed_ptr, temperature_ptr, top_ptr, sum_ptr, best_ptr, best_token_ptr,
    vocab_size, TRUST: tl.constexpr, SPREAD: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Store the largest P(v | u) of each block of a row, and its token; of a greedy request the largest logit."""
    row, block, num_blocks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    blocks, tops, scale, mass = _load_block_sums(top_ptr, sum_ptr, row, num_blocks, BLOCKS)
    u, is_greedy = _load_u(slot_ptr, pos_ptr, seed_ptr, temperature_ptr, row)
    top = tl.max(tl.where(blocks == block, tops, float("-inf")), axis=0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    own = tl.where(x > float("-inf"), tl.exp(x - top), 0.0).to(tl.float64)
    own *= tl.sum(tl.where(blocks == block, scale, 0.0), axis=0)
    before = tl.sum(tl.where(blocks < block, mass, 0.0), axis=0)
    total = tl.sum(mass, axis=0)
    end = before + tl.cumsum(own, axis=0)
    shift = TRUST * ndtri(u.to(tl.float64) + _HALF_STEP)
    below_end = ndtr((ndtri(end / total) - shift) / SPREAD)
    below_start = ndtr((ndtri((end - own) / total) - shift) / SPREAD)
    rated = tl.where(own > 0.0, below_end - below_start, -1.0)
    rated = tl.where(is_greedy, tl.where(x > float("-inf"), x, float("-inf")).to(tl.float64), rated)
    tl.store(best_ptr + row * num_blocks + block, tl.max(rated, axis=0))
    tl.store(best_token_ptr + row * num_blocks + block, block * BLOCK + tl.argmax(rated, axis=0))


def pick(logits: Tensor, u: Tensor) -> Tensor:
    """Return `naive.pick`; half precisions are read as float32."""
    return _select(logits, u.contiguous(), dict.fromkeys(STATE, u), None)  # the state is not read


def select_tokens(
    logits: Tensor, slots: Tensor, pos: Tensor, seeds: Tensor, temperature: Tensor, trust: float | None = None
) -> Tensor:
    """Return `naive.select_tokens`; half precisions are read as float32."""
    state = dict(zip(STATE, (slots.contiguous(), pos.contiguous(), seeds, temperature), strict=True))
    return _select(logits, None, state, trust)


def _select(logits: Tensor, u: Tensor | None, state: dict[str, Tensor], trust: float | None) -> Tensor:
    """Return tokens [T] of logits [T, V] by u [T], or by the u of the rows' requests where it is None."""
    (num_rows, vocab_size), block = logits.shape, BLOCK if trust is None else RATED
    token = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return token
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    grid = num_rows, triton.cdiv(vocab_size, block)
    top, sums = (torch.empty(grid, dtype=dtype, device=logits.device) for dtype in (torch.float32, torch.float64))
    shared = {"logits_ptr": logits, "row_stride": logits.stride(0), "top_ptr": top, "sum_ptr": sums}
    shared |= {"vocab_size": vocab_size, "BLOCK": block, "num_warps": 8}
    _sum_blocks[(num_rows, grid[1])](**shared)
    shared |= state | {"BLOCKS": triton.next_power_of_2(grid[1])}
    if trust is None:
        _pick_rows[(num_rows,)](**shared, u_ptr=top if u is None else u, token_ptr=token, HAS_U=u is not None)
        return token
    best, tokens = torch.empty_like(sums), torch.empty(grid, dtype=torch.int64, device=logits.device)
    rated = {"best_ptr": best, "best_token_ptr": tokens, "TRUST": trust, "SPREAD": (1 - trust * trust) ** 0.5}
    _rate_blocks[(num_rows, grid[1])](**shared, **rated)
    return tokens.gather(1, best.argmax(dim=1, keepdim=True))[:, 0]
