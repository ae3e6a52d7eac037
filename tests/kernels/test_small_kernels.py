"""Couple, leaf, pick and uniform: their definitions, and the kernels against them.

The kernels are interpreted on a CPU and run natively on a GPU.
"""

from __future__ import annotations

import struct
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from tests.support import interpreted
from tests.support.interpreted import moved
from vllm_mtpc.kernels.couple import naive as couple_naive
from vllm_mtpc.kernels.pick import pick, select_tokens
from vllm_mtpc.kernels.pick.naive import conditional, of_mass
from vllm_mtpc.kernels.uniform import naive, uniform


def rows(requests: int, width: int, draft_dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor, Tensor, int]:
    """Requests of 0 .. width rows and padding; few tokens, so that half of the drafts are right."""
    generator = torch.Generator().manual_seed(requests + width)
    count = torch.randint(width + 1, (requests,), generator=generator)
    cu_num_logits = torch.cat([torch.zeros(1, dtype=torch.long), count.cumsum(0)]).int()
    total = int(count.sum()) + 3
    tokens, drafts = torch.randint(2, (2, total), generator=generator)
    drafts[::11] = -1
    return tokens, drafts.to(draft_dtype), cu_num_logits, width


def with_others(requests: int, width: int) -> tuple[Any, ...]:
    """Two of three are coupled; the others keep 7, 7, ..."""
    others = (torch.arange(requests) % 3 > 0, torch.full((requests, width), 7), torch.full((requests,), 7).int())
    return (*rows(requests, width), others)


HALF, WHOLE = torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")
LARGEST = 1 - 2**-24
SIZES = [(300, 200), (1, 1), (20, 1), (50, 17), (50, 4096), (50, 4097), (60, 13_000), (5, 150_000)]


def draws(rows: int, vocab: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + vocab)
    logits = torch.randn(rows, vocab, generator=generator) * scale
    u = torch.randint(2**24, (rows,), generator=generator) * 2.0**-24
    u[0] = LARGEST
    return logits, u


def holes(vocab: int = 9000) -> tuple[Tensor, Tensor]:
    """Rows with runs of -inf: at the start, at the end, between, whole blocks, everything but one token; and NaN."""
    logits, _ = draws(30, vocab)
    runs = [(0, 5000), (4096, 8192), (4000, vocab), (100, 8500), (1, vocab), (0, vocab - 1)]
    for row, (start, end) in enumerate(runs):
        logits[5 * row : 5 * row + 5, start:end] = -INF
    logits[20:25, 0] = -30.0  # the only token of its row
    logits[:25:7, vocab - 1] = NAN
    u = torch.tensor([0.0, 0.25, 0.5, 0.999, LARGEST]).repeat(6)
    return logits, u


def strided() -> tuple[Tensor, Tensor]:
    """Rows with other numbers after and between them, large enough to be picked."""
    logits, u = draws(50, 300)
    padded = torch.full((50, 311), 1e4)
    padded[:, :300] = logits
    return padded[:, :300], u


def edges() -> tuple[Tensor, Tensor]:
    """Equal masses, u at every edge: exact in both, so no side may be chosen freely."""
    return torch.zeros(64, 8192), torch.arange(64) / 64


def uniforms() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    extremes = torch.tensor([-(2**63), -(2**32), -1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
    seed = torch.cat([extremes, torch.randint(-(2**63), 2**63 - 1, (5000,), generator=generator)])
    pos = torch.cat([extremes.flip(0), torch.arange(5000)])
    return seed, pos


def selected(rows: int, vocab: int, trust: float | None, dtype: torch.dtype = WHOLE) -> tuple[Any, ...]:
    """Rows of six request slots, one of them greedy; runs of -inf in every fifth row."""
    generator = torch.Generator().manual_seed(9)
    logits = draws(rows, vocab)[0].to(dtype)
    logits[::5, vocab // 3 : vocab - 2] = -INF
    slots = torch.randint(6, (rows,), generator=generator, dtype=torch.int32)
    seeds = torch.randint(-(2**63), 2**63 - 1, (6,), generator=generator)
    temperature = torch.tensor([1.0, 0.5, 0.0, 1.0, 2.0, 0.7])
    return logits, slots, torch.arange(3, 3 + rows), seeds, temperature, trust


CASES: dict[str, tuple[str, tuple[Any, ...]]] = {  # the operation and its arguments
    "width 8": ("couple:accept", rows(60, 8)),
    "width 2, int32": ("couple:accept", rows(20, 2, torch.int32)),
    "width 17": ("couple:accept", rows(40, 17)),
    "width 1": ("couple:accept", rows(5, 1)),
    "next to others": ("couple:accept", with_others(30, 8)),
    "no requests": ("couple:accept", rows(0, 4)),
    "all right": ("couple:accept", (torch.ones(9, dtype=torch.long), torch.ones(9), torch.tensor([0, 4, 8]), 4)),
    **{f"{rows}x{vocab}": ("pick:pick", draws(rows, vocab)) for rows, vocab in SIZES},
    "peaked": ("pick:pick", draws(80, 5000, scale=20.0)),
    "holes": ("pick:pick", holes()),
    "strided": ("pick:pick", strided()),
    "edges": ("pick:pick", edges()),
    "empty rows": ("pick:pick", (torch.tensor([[-INF] * 5000, [NAN] * 5000]), torch.tensor([0.0, LARGEST]))),
    "bfloat16": ("pick:pick", (draws(100, 500)[0].bfloat16(), draws(100, 500)[1])),
    "no rows": ("pick:pick", (torch.zeros(0, 7), torch.zeros(0))),
    "alone": ("pick:pick", tuple(part[7:8] for part in draws(60, 13_000))),
    "picks": ("pick:select_tokens", selected(80, 9000, None)),
    "picks of bfloat16": ("pick:select_tokens", selected(40, 300, None, HALF)),
    "no trust": ("pick:select_tokens", selected(60, 2500, 0.001)),
    "trust": ("pick:select_tokens", selected(120, 2500, 0.87)),
    "trust of bfloat16": ("pick:select_tokens", selected(60, 300, 0.6, HALF)),
    "full trust": ("pick:select_tokens", selected(60, 1024, 0.9999)),
    "uniform": ("uniform:uniform", uniforms()),
    "int32 positions": ("uniform:uniform", (torch.arange(2000), torch.arange(2000, dtype=torch.int32))),
    "none": ("uniform:uniform", (torch.zeros(0, dtype=torch.int64),) * 2),
}


def launch_all(cases: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the output of each case's kernel on the CPU."""
    results = {}
    for name, (operation, arguments) in cases.items():
        module, _, function = operation.partition(":")
        by_device = import_module(f"vllm_mtpc.kernels.{module}" + ("" if device == "cuda" else ".kernel"))
        out = getattr(by_device, function)(*moved(arguments, device))
        results[name] = out.cpu() if isinstance(out, Tensor) else tuple(part.cpu() for part in out)
    return results


torch.set_num_threads(1)

EDGE, AT_EDGE = 1e-6, 1e-3  # tokens may differ where u is as close as this to an edge, in less than this share of draws
SIGNIFICANCE, CAUGHT = 1e-4, 1e-12  # seeds are fixed: a right stream gives less than the first once in 10 000 seeds
DRAWS = 20_000


@pytest.fixture(scope="module", params=interpreted.INTERPRETERS)
def outputs(request: pytest.FixtureRequest) -> dict[str, Any]:
    return interpreted.launch(launch_all, CASES, request.param)


def of(operation: str, *others: str) -> pytest.MarkDecorator:
    names = [name for name, case in CASES.items() if case[0] == operation and name not in others]
    return pytest.mark.parametrize("name", names)


@of("couple:accept")
def test_accept_equals_its_definition(name: str, outputs: dict[str, Any]) -> None:
    (kept, count), wanted = outputs[name], couple_naive.accept(*CASES[name][1])
    assert torch.equal(kept, wanted[0]) and torch.equal(count, wanted[1])
    assert kept.dtype == torch.int64 and count.dtype == torch.int32


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


def test_uniform_is_the_hash_of_seed_and_position() -> None:
    published = {(b"", 1): 0x514E28B7, (b"\0\0\0\0", 0): 0x2362F9DE, (b"test", 0): 0xBA6BD213}
    assert {given: murmur3(*given) for given in published} == published
    extremes = [-(2**63), -(2**32), -1, 0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1]
    pairs = [(seed, pos) for seed in extremes for pos in extremes]
    pairs += torch.randint(-(2**63), 2**63 - 1, (300, 2), generator=torch.Generator().manual_seed(0)).tolist()
    wanted = [(murmur3(struct.pack("<qq", *pair), naive.DOMAIN) >> 8) / 2**24 for pair in pairs]
    got = uniform(*torch.tensor(pairs).unbind(1))
    assert got.dtype == torch.float32 and got.double().tolist() == wanted


@of("uniform:uniform")
def test_uniform_bit_for_bit(name: str, outputs: dict[str, Any]) -> None:
    seed, pos = CASES[name][1]
    wanted = naive.uniform(seed, pos.long())
    assert outputs[name].dtype == torch.float32
    assert torch.equal(outputs[name].view(torch.int32), wanted.view(torch.int32))


def edges_of(logits: np.ndarray) -> np.ndarray:
    """Cumulative masses [..., V] in float64; NaN has none."""
    x = np.where(np.isnan(logits), -INF, logits).astype(np.float64)
    return np.exp(x - x.max(axis=-1, keepdims=True)).cumsum(axis=-1)


def searched(logits: np.ndarray, u: float) -> int:
    """The reference: right-sided search in the cumulative masses."""
    edges = edges_of(logits)
    found = int(np.searchsorted(edges, float(u) * edges[-1], side="right"))
    return min(found, int(np.flatnonzero(logits > -INF)[-1]))


def test_of_mass_never_picks_a_token_without_mass() -> None:
    """Float32 masses as drafts have them, and u of 53 bits; also the largest one, which rounds up to the whole."""
    mass = torch.tensor([[0.0, 0.1, 0.0, 1e-30, 0.2, 0.0]] * 4)
    u = torch.tensor([0.0, 0.1 / 0.3 - 1e-6, 0.1 / 0.3 + 1e-6, 1 - 2**-53], dtype=torch.float64)
    assert of_mass(mass, u).tolist() == [1, 1, 4, 4]
    assert int(of_mass(torch.full((1, 3), NAN), u[:1])) < 3, "a token at any rate"


DISTRIBUTION = np.array([0.3, 0.05, 0.0, 0.2, 0.1, 0.0, 0.33, 0.02])


def p_value(u: Tensor) -> float:
    """Chi-square of DRAWS tokens against DISTRIBUTION."""
    tokens = pick(torch.tensor(DISTRIBUTION).float().log().expand(DRAWS, -1), u)
    counts, has_mass = np.bincount(tokens.numpy(), minlength=len(DISTRIBUTION)), DISTRIBUTION > 0
    assert counts[~has_mass].sum() == 0
    return float(chisquare(counts[has_mass], DISTRIBUTION[has_mass] * DRAWS).pvalue)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**40])
def test_picks_follow_the_distribution(seed: int) -> None:
    index = torch.arange(DRAWS)
    along_positions, along_seeds = uniform(torch.full((DRAWS,), seed), index), uniform(index, torch.full_like(index, 9))
    assert p_value(along_positions) > SIGNIFICANCE and p_value(along_seeds) > SIGNIFICANCE
    assert p_value(along_positions * 0.99) < CAUGHT, "an injected bias must be caught"


@of("pick:pick", "edges", "empty rows")
def test_definition_and_kernel_of_pick_equal_searchsorted(name: str, outputs: dict[str, Any]) -> None:
    (logits, u), got = CASES[name][1], outputs[name]
    edges = edges_of(logits.float().numpy())
    at_edge = np.abs(edges / edges[:, -1:] - u.double().numpy()[:, None]).min(axis=1, initial=1) < EDGE
    by_definition = pick(logits, u)
    wanted = [searched(row, number) for row, number in zip(logits.float().numpy(), u, strict=True)]
    for found in (by_definition, got):
        assert found.dtype == torch.int64 and found.shape == u.shape
        differs = found.numpy() != wanted
        assert not (differs & ~at_edge).any() and differs.sum() <= max(1, AT_EDGE * len(u))
        assert (logits.gather(1, found[:, None]) > -INF).all(), "a token without mass"


@of("pick:select_tokens")
def test_selected_tokens_are_those_of_the_definition(name: str, outputs: dict[str, Any]) -> None:
    (logits, slots, pos, seeds, temperature, trust), got = CASES[name][1], outputs[name]
    wanted = select_tokens(logits, slots, pos, seeds, temperature, trust)
    is_greedy, differs = temperature[slots] == 0, got != wanted
    assert got.dtype == torch.int64 and is_greedy.any() and not differs[is_greedy].any()
    # exp in float32 moves edges by up to 1e-7 of the mass: a token differs where two are that close
    assert differs.double().mean() <= 0.02
    if trust is not None:
        given = conditional(logits, uniform(seeds[slots], pos), trust)
        short = given.amax(-1) - given.gather(1, got[:, None])[:, 0]
        assert short[~is_greedy].max() < 1e-7 / (1 - trust * trust) ** 0.5


def test_pick_at_exact_edges_and_in_any_batch(outputs: dict[str, Any]) -> None:
    """Token k/64 of the vocabulary begins at u = k/64 exactly; a row without mass gives its last token."""
    for name, wanted in (("edges", list(range(0, 8192, 128))), ("empty rows", [4999, 4999])):
        assert outputs[name].tolist() == pick(*CASES[name][1]).tolist() == wanted
    assert outputs["alone"][0] == outputs["60x13000"][7]
