"""Couple, leaf, pick and uniform: their definitions, and the kernels against them.

The kernels are interpreted on a CPU and run natively on a GPU.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from tests.support import interpreted
from tests.support.kernel_cases import CASES, INF, LARGEST, NAN, numbers, rows
from vllm_mtpc.kernels import leaf
from vllm_mtpc.kernels.couple import naive as couple_naive
from vllm_mtpc.kernels.leaf import naive as leaf_naive
from vllm_mtpc.kernels.pick import pick, select_tokens
from vllm_mtpc.kernels.pick.naive import conditional, of_mass
from vllm_mtpc.kernels.uniform import naive, uniform

torch.set_num_threads(1)

EDGE, AT_EDGE = 1e-6, 1e-3  # tokens may differ where u is as close as this to an edge, in less than this share of draws
SIGNIFICANCE, CAUGHT = 1e-4, 1e-12  # seeds are fixed: a right stream gives less than the first once in 10 000 seeds
COUNT, DRAWS = 1 << 17, 20_000


@pytest.fixture(scope="module")
def outputs() -> dict[str, Any]:
    return interpreted.launch(interpreted.launch_all, CASES)


def of(operation: str, *others: str) -> pytest.MarkDecorator:
    names = [name for name, case in CASES.items() if case[0] == operation and name not in others]
    return pytest.mark.parametrize("name", names)


@of("couple")
def test_accept_equals_its_definition(name: str, outputs: dict[str, Any]) -> None:
    (kept, count), wanted = outputs[name], couple_naive.accept(*CASES[name][1])
    assert torch.equal(kept, wanted[0]) and torch.equal(count, wanted[1])
    assert kept.dtype == torch.int64 and count.dtype == torch.int32


def test_accept_keeps_results_of_other_requests(outputs: dict[str, Any]) -> None:
    (kept, count), (alone, _) = outputs["next to others"], couple_naive.accept(*rows(30, 8))
    assert (kept[::3] == 7).all() and (count[::3] == 7).all() and torch.equal(kept[1::3], alone[1::3])


@of("leaf")
def test_terms_equal_their_definition(name: str, outputs: dict[str, Any]) -> None:
    states, weight, token = CASES[name][1]
    assert outputs[name].dtype == torch.float32
    # sums of up to 150 products of about 1 / 12 in another order, in float32
    wanted = leaf_naive.terms(states.float(), weight.float(), token)
    torch.testing.assert_close(outputs[name], wanted, rtol=1e-5, atol=1e-5)
    is_outside = (token < 0) | (token >= weight.shape[1])
    assert torch.equal(outputs[name][:, 1] == -INF, is_outside[:, None].expand(-1, weight.shape[0]))


def test_logits_are_products_with_each_unembedding() -> None:
    states, weight = numbers(2, 8), numbers(4, 3, 5, 8)
    found = leaf.logits(states, weight)
    for k in range(4):
        for z in range(3):
            torch.testing.assert_close(found[:, k, z], states @ weight[k, z].T)  # other orders of summation


def test_terms_are_those_of_log_softmax() -> None:
    logits, token = numbers(6, 3, 9) * 5, torch.tensor([0, 8, 3, 4, 4, 1])
    norm, picked = leaf_naive.terms_of(logits, token).unbind(1)
    torch.testing.assert_close(picked - norm, logits.log_softmax(-1)[torch.arange(6), :, token])


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


@of("uniform")
def test_uniform_bit_for_bit(name: str, outputs: dict[str, Any]) -> None:
    seed, pos = CASES[name][1]
    wanted = naive.uniform(seed, pos.long())
    assert outputs[name].dtype == torch.float32
    assert torch.equal(outputs[name].view(torch.int32), wanted.view(torch.int32))


def stream(seed: int, start: int = 0) -> np.ndarray:
    """u of COUNT neighbouring positions."""
    return uniform(torch.full((COUNT,), seed), torch.arange(start, start + COUNT)).numpy()


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


def edges_of(logits: np.ndarray) -> np.ndarray:
    """Cumulative masses [..., V] in float64; NaN has none."""
    x = np.where(np.isnan(logits), -INF, logits).astype(np.float64)
    return np.exp(x - x.max(axis=-1, keepdims=True)).cumsum(axis=-1)


def searched(logits: np.ndarray, u: float) -> int:
    """The reference: right-sided search in the cumulative masses."""
    edges = edges_of(logits)
    found = int(np.searchsorted(edges, float(u) * edges[-1], side="right"))
    return min(found, int(np.flatnonzero(logits > -INF)[-1]))


def picked(logits: list[float] | np.ndarray, u: float) -> int:
    return int(pick(torch.tensor(np.array([logits]), dtype=torch.float32), torch.tensor([u]))[0])


UNIFORMS = st.one_of(st.sampled_from([0.0, 0.5, LARGEST]), st.integers(0, 2**24 - 1).map(lambda n: n / 2**24))
ROWS = st.lists(st.one_of(st.just(-INF), st.floats(-30, 30, width=32)), min_size=1, max_size=60)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(row=ROWS.filter(lambda row: max(row) > -INF), u=UNIFORMS, before=st.integers(0, 5), after=st.integers(0, 5))
def test_pick_equals_searchsorted(row: list[float], u: float, before: int, after: int) -> None:
    logits = np.array([-INF] * before + row + [-INF] * after, dtype=np.float32)
    got, edges = picked(logits, u), edges_of(logits)
    # torch and numpy differ in the last digits of exp: at an edge either side will do
    at_edge = np.abs(edges / edges[-1] - u).min() < 1e-13
    assert got == searched(logits, u) or (at_edge and logits[got] > -INF)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(row=st.lists(st.booleans(), min_size=1, max_size=64).filter(any), numerator=st.integers(0, 63))
def test_pick_equals_searchsorted_where_u_is_an_edge(row: list[bool], numerator: int) -> None:
    """Masses of 0 and 1 add up exactly, so the token is unique."""
    logits = np.where(row, 0.0, -INF).astype(np.float32)
    for u in (numerator / 64, numerator / 2 ** np.ceil(np.log2(64 + sum(row))), 0.0, LARGEST):
        assert picked(logits, u) == searched(logits, u)


@pytest.mark.parametrize(
    "row, u, wanted",
    [
        ([0, 0, 0, 0], [0, 0.25, 0.5, 0.75, LARGEST], [0, 1, 2, 3, 3]),  # an edge belongs to the next token
        ([0, -INF, -INF, 0], [0.25, 0.5, 0.75], [0, 3, 3]),
        *(([-INF] * at + [-40.0] + [-INF] * (6 - at), [0.0, 0.5, LARGEST, 1.0], [at] * 4) for at in (0, 3, 6)),
        ([-INF, -INF, 1.0, -INF, 2.0, NAN, -INF], [0.0, 0.9, LARGEST, 1.0], [2, 4, 4, 4]),
        ([-INF] * 3, [0.5], [2]),
        ([NAN] * 3, [0.5], [2]),
    ],
)
def test_edges_and_tokens_without_mass(row: list[float], u: list[float], wanted: list[int]) -> None:
    assert [picked(row, number) for number in u] == wanted


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


@of("pick", "edges", "empty rows")
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
    """Token k/64 of the vocabulary begins at u = k/64 exactly."""
    assert outputs["edges"].tolist() == list(range(0, 8192, 128))
    assert outputs["alone"][0] == outputs["150x13000"][7]
    assert outputs["empty rows"].tolist() == [4999, 4999]
