"""Pick against numpy's searchsorted, its distribution by chi-square, and its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.kernels.pick.naive import of_mass
from vllm_mtpc.kernels.uniform import uniform

torch.set_num_threads(1)
SIGNIFICANCE, CAUGHT = 1e-4, 1e-12  # seeds are fixed: a right sampler gives less than the first once in 10 000 seeds
DRAWS = 20_000
LARGEST = 1 - 2**-24
INF = float("inf")


def cumulative(logits: np.ndarray) -> np.ndarray:
    """F [V] in float64, 0 .. 1."""
    mass = np.exp(logits.astype(np.float64) - logits.max())
    return np.cumsum(mass) / mass.sum()


def searched(logits: np.ndarray, u: float) -> int:
    """The reference: right-sided search in the cumulative masses."""
    mass = np.exp(logits.astype(np.float64) - logits.max())
    edges = np.cumsum(mass)
    found = int(np.searchsorted(edges, float(u) * edges[-1], side="right"))
    return min(found, int(np.flatnonzero(mass)[-1]))


def picked(logits: list[float] | np.ndarray, u: float) -> int:
    return int(pick(torch.tensor(np.array([logits]), dtype=torch.float32), torch.tensor([u]))[0])


UNIFORMS = st.one_of(st.sampled_from([0.0, 0.5, LARGEST]), st.integers(0, 2**24 - 1).map(lambda n: n / 2**24))
ROWS = st.lists(st.one_of(st.just(-INF), st.floats(-30, 30, width=32)), min_size=1, max_size=60).filter(
    lambda row: max(row) > -INF
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(row=ROWS, u=UNIFORMS, before=st.integers(0, 5), after=st.integers(0, 5))
def test_equals_searchsorted(row: list[float], u: float, before: int, after: int) -> None:
    logits = np.array([-INF] * before + row + [-INF] * after, dtype=np.float32)
    got = picked(logits, u)
    # torch and numpy differ in the last digits of exp: at an edge either side will do
    at_edge = np.abs(cumulative(logits) - u).min() < 1e-13
    assert got == searched(logits, u) or (at_edge and logits[got] > -INF)


def test_of_mass_never_picks_a_token_without_mass() -> None:
    """Float32 masses as drafts have them, and u of 53 bits; also the largest one, which rounds up to the whole."""
    mass = torch.tensor([[0.0, 0.1, 0.0, 1e-30, 0.2, 0.0]] * 4)
    u = torch.tensor([0.0, 0.1 / 0.3 - 1e-6, 0.1 / 0.3 + 1e-6, 1 - 2**-53], dtype=torch.float64)
    assert of_mass(mass, u).tolist() == [1, 1, 4, 4]
    assert int(of_mass(torch.full((1, 3), torch.nan), u[:1])) < 3, "a token at any rate"


@settings(deadline=None, derandomize=True, max_examples=200)
@given(row=st.lists(st.booleans(), min_size=1, max_size=64).filter(any), numerator=st.integers(0, 63))
def test_equals_searchsorted_where_u_is_an_edge(row: list[bool], numerator: int) -> None:
    """Masses of 0 and 1 add up exactly, so the token is unique."""
    logits = np.where(row, 0.0, -INF).astype(np.float32)
    for u in (numerator / 64, numerator / 2 ** np.ceil(np.log2(64 + sum(row))), 0.0, LARGEST):
        assert picked(logits, u) == searched(logits, u)


@pytest.mark.parametrize("vocab", [1, 2, 3, 1000, 4096, 4097, 10_001])
def test_equals_searchsorted_at_sizes(vocab: int) -> None:
    generator = np.random.default_rng(vocab)
    logits = (generator.standard_normal((40, vocab)) * 4).astype(np.float32)
    logits[:, 1:][generator.random((40, vocab - 1)) < 0.3] = -INF
    u = (generator.integers(0, 2**24, 40) / 2**24).astype(np.float32)
    u[:2] = 0, LARGEST
    got = pick(torch.tensor(logits), torch.tensor(u))
    assert got.dtype == torch.int64
    assert got.tolist() == [searched(row, number) for row, number in zip(logits, u, strict=True)]


@pytest.mark.parametrize(
    "row, u, wanted",
    [
        ([0, 0, 0, 0], [0, 0.25, 0.5, 0.75, LARGEST], [0, 1, 2, 3, 3]),  # an edge belongs to the next token
        ([0, -INF, -INF, 0], [0.25, 0.5, 0.75], [0, 3, 3]),
        *(([-INF] * at + [-40.0] + [-INF] * (6 - at), [0.0, 0.5, LARGEST, 1.0], [at] * 4) for at in (0, 3, 6)),
        ([-INF, -INF, 1.0, -INF, 2.0, float("nan"), -INF], [0.0, 0.9, LARGEST, 1.0], [2, 4, 4, 4]),
        ([-INF] * 3, [0.5], [2]),
        ([float("nan")] * 3, [0.5], [2]),
    ],
)
def test_edges_and_tokens_without_mass(row: list[float], u: list[float], wanted: list[int]) -> None:
    assert [picked(row, number) for number in u] == wanted
    assert pick(torch.zeros(0, 5), torch.zeros(0)).shape == (0,)


DISTRIBUTION = torch.tensor([0.3, 0.05, 0.0, 0.2, 0.1, 0.0, 0.33, 0.02])


def p_value(u: torch.Tensor) -> float:
    """Chi-square of DRAWS tokens against DISTRIBUTION."""
    tokens = pick(DISTRIBUTION.log().expand(DRAWS, -1), u)
    counts, has_mass = np.bincount(tokens.numpy(), minlength=len(DISTRIBUTION)), (DISTRIBUTION > 0).numpy()
    assert counts[~has_mass].sum() == 0
    distribution = DISTRIBUTION.double().numpy()[has_mass]
    return float(chisquare(counts[has_mass], distribution / distribution.sum() * DRAWS).pvalue)


@pytest.mark.parametrize("seed", [0, 1, -5, 2**40])
def test_picks_follow_the_distribution(seed: int) -> None:
    index = torch.arange(DRAWS)
    along_positions, along_seeds = uniform(torch.full((DRAWS,), seed), index), uniform(index, torch.full_like(index, 9))
    assert p_value(along_positions) > SIGNIFICANCE and p_value(along_seeds) > SIGNIFICANCE
    assert p_value(along_positions * 0.99) < CAUGHT, "an injected bias must be caught"
