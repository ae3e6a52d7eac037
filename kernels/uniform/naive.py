"""A uniform number for every (seed, position): MurmurHash3 (Appleby, x86 32 bits) of the 16 bytes of the two.

The hash's own seed is DOMAIN, so that other hashes of the same pair give independent streams.
"""

from __future__ import annotations

import torch
from torch import Tensor

DOMAIN = 0x50545055  # the hash's seed
BITS = 24  # float32 holds every multiple of 2^-24 below 1
WORD = 0xFFFFFFFF


def uniform(seed: Tensor, pos: Tensor) -> Tensor:
    """Return u [T] float32 in [0, 1 - 2^-24], multiples of 2^-24, of seed [T] int64 and pos [T] int64."""
    h = torch.full_like(seed.long(), DOMAIN)
    for number in (seed.long(), pos.long()):
        for word in (number & WORD, (number >> 32) & WORD):
            key = _times(_rotated(_times(word, 0xCC9E2D51), 15), 0x1B873593)
            h = (_times(_rotated(h ^ key, 13), 5) + 0xE6546B64) & WORD
    h = h ^ 16  # the length in bytes
    h = _times(h ^ (h >> 16), 0x85EBCA6B)
    h = _times(h ^ (h >> 13), 0xC2B2AE35)
    h = h ^ (h >> 16)
    return (h >> (32 - BITS)).float() * 2.0**-BITS


def _times(x: Tensor, factor: int) -> Tensor:
    """Return x * factor mod 2^32 of x in [0, 2^32) as int64; computed in halves, so that no product overflows."""
    return (x * (factor & 0xFFFF) + (((x * (factor >> 16)) & 0xFFFF) << 16)) & WORD


def _rotated(x: Tensor, bits: int) -> Tensor:
    return ((x << bits) | (x >> (32 - bits))) & WORD
