"""`naive.uniform` in Triton, bit for bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mtpc.kernels.uniform import naive

BLOCK = 1024
_DOMAIN = tl.constexpr(naive.DOMAIN)


@triton.jit
def _rotated(x, bits: tl.constexpr):
    return (x << bits) | (x >> (32 - bits))


@triton.jit
def _mixed(h, word):
    key = _rotated(word * 0xCC9E2D51, 15) * 0x1B873593
    return _rotated(h ^ key, 13) * 5 + 0xE6546B64


@triton.jit
def uniform_kernel(seed, pos):
    """Return u float32 of seed and pos, int64 of the same shape."""
    h = (seed ^ seed).to(tl.uint32) ^ _DOMAIN
    h = _mixed(h, seed.to(tl.uint32))
    h = _mixed(h, (seed >> 32).to(tl.uint32))
    h = _mixed(h, pos.to(tl.uint32))
    h = _mixed(h, (pos >> 32).to(tl.uint32))
    h ^= 16
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    return (h >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit(do_not_specialize=["num_rows"])
def _uniform_rows(seed_ptr, pos_ptr, u_ptr, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    seed = tl.load(seed_ptr + row, mask=mask, other=0)
    pos = tl.load(pos_ptr + row, mask=mask, other=0)
    tl.store(u_ptr + row, uniform_kernel(seed.to(tl.int64), pos.to(tl.int64)), mask=mask)


def uniform(seed: Tensor, pos: Tensor) -> Tensor:
    """Return `naive.uniform`, bit for bit."""
    num_rows = seed.shape[0]
    u = torch.empty(num_rows, dtype=torch.float32, device=seed.device)
    if num_rows:
        _uniform_rows[(triton.cdiv(num_rows, BLOCK),)](seed.contiguous(), pos.contiguous(), u, num_rows, BLOCK=BLOCK)
    return u
