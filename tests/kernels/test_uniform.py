"""u of (seed, position): the hash it says it is, its range, and no pattern along positions or seeds."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from vllm_mtpc.kernels.uniform import naive, uniform

torch.set_num_threads(1)
SIGNIFICANCE, CAUGHT = 1e-4, 1e-12  # seeds are fixed: a right stream gives less than the first once in 10 000 seeds
COUNT = 1 << 17
EXTREMES = [-(2**63), -(2**32), -1, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]


def murmur3(data: bytes, seed: int) -> int:
    """MurmurHash3 x86 32 of data whose length is a multiple of 4, after its description."""
    h = seed
    for (key,) in struct.iter_unpack("<I", data):
        key = key * 0xCC9E2D51 % 2**32
        key = (key << 15 | key >> 17) % 2**32 * 0x1B873593 % 2**32
        h ^= key
        h = ((h << 13 | h >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        h = (h ^ h >> shift) * factor % 2**32
    return h


def stream(seed: int, start: int = 0) -> np.ndarray:
    """u of COUNT neighbouring positions."""
    return uniform(torch.full((COUNT,), seed), torch.arange(start, start + COUNT)).numpy()


def test_reference_gives_published_values() -> None:
    assert murmur3(b"", 1) == 0x514E28B7
    assert murmur3(b"\0\0\0\0", 0) == 0x2362F9DE
    assert murmur3(b"test", 0) == 0xBA6BD213
    assert murmur3(b"aaaa", 0x9747B28C) == 0x5A97808A


def test_uniform_is_the_hash_of_seed_and_position() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = [(seed, pos) for seed in EXTREMES for pos in EXTREMES]
    pairs += torch.randint(-(2**63), 2**63 - 1, (300, 2), generator=generator).tolist()
    seed, pos = torch.tensor(pairs).unbind(1)
    wanted = [(murmur3(struct.pack("<qq", *pair), naive.DOMAIN) >> 8) / 2**24 for pair in pairs]
    got = uniform(seed, pos)
    assert got.dtype == torch.float32 and got.double().tolist() == wanted


def test_uniform_has_the_documented_range() -> None:
    u = np.concatenate([stream(seed) for seed in range(4)]).astype(np.float64)
    assert u.min() >= 0 and u.max() <= 1 - 2**-24
    assert (u * 2**24 == np.floor(u * 2**24)).all()
    counts = np.bincount((u * 256).astype(int), minlength=256)
    assert chisquare(counts).pvalue > SIGNIFICANCE


def test_positions_may_be_int32_and_none() -> None:
    pos = torch.tensor([0, 7, 2**31 - 1])
    seed = torch.tensor([3, -3, 5])
    assert torch.equal(uniform(seed, pos.int()), uniform(seed, pos))
    assert uniform(seed[:0], pos[:0]).shape == (0,)


def pairs_p_value(first: np.ndarray, second: np.ndarray) -> float:
    """Chi-square of pairs on a grid of 16 x 16."""
    counts = np.bincount((first * 16).astype(int) * 16 + (second * 16).astype(int), minlength=256)
    return float(chisquare(counts).pvalue)


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """In standard deviations of that of independent numbers."""
    return float(np.corrcoef(first, second)[0, 1] * np.sqrt(len(first)))


LAGS = [(seed, seed, lag) for seed in (0, 1, -1, 2**62 + 12345) for lag in (1, 2, 3, 16)]
SEEDS = [(0, other, shift) for other in (1, 2**31, 2**32, -1, 1 << 24) for shift in (0, 1, -1 % COUNT)]


@pytest.mark.parametrize("seed, other, shift", [*LAGS, *SEEDS])
def test_positions_and_seeds_are_independent(seed: int, other: int, shift: int) -> None:
    """Also seeds at shifted positions: no stream is another one moved."""
    first, second = stream(seed), stream(other, shift)
    assert pairs_p_value(first, second) > SIGNIFICANCE
    assert abs(correlation(first, second)) < 4.5


def test_injected_pattern_is_found() -> None:
    golden = np.arange(COUNT) * 0.6180339887498949 % 1
    counts = np.bincount((golden * 256).astype(int), minlength=256)
    assert chisquare(counts).pvalue > SIGNIFICANCE  # one by one they look uniform
    assert pairs_p_value(golden[:-1], golden[1:]) < CAUGHT
    u = stream(0)
    assert correlation(u[:-1], 0.98 * u[1:] + 0.02 * u[:-1]) > 4.5
