"""Group sizes of the merged pass: the best of all tables and a simulated chain."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_mtpc.errors import HeadConfigError, ServeConfigError
from vllm_mtpc.plan.row_groups import choose_groups, merged_plan

VARIANTS = ("o-ptp", "c-ptp")


def independent(p: float, drafts: int) -> list[float]:
    """Every draft is right with probability p, whatever the others are."""
    return [p**g * (1 - p) for g in range(drafts)] + [p**drafts]


def head_of(accepted: list[float]) -> Any:
    return SimpleNamespace(accepted=accepted, variant="o-ptp", window=len(accepted))


def expected(accepted: np.ndarray, sizes: tuple[int, ...], variant: str) -> float:
    """Tokens per step of a table by the powers of its chain over v, from the first step of a request on."""
    drafts = len(sizes) - 1
    after = [max(0, size - (variant == "o-ptp")) for size in sizes]
    survival = [accepted[g:].sum() for g in range(drafts + 1)]
    step = np.zeros((drafts + 1, drafts + 1))
    for v in range(drafts + 1):
        for d in range(v + 1):
            step[v, after[d]] += survival[v] if d == v else survival[d] - survival[d + 1]
    often = np.linalg.matrix_power(step, 2**14)[after[0]]
    return float(often @ np.cumsum(survival))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("drafts", "budget"), [(1, 2), (2, 3), (2, 5), (3, 4), (3, 6), (3, 10)])
def test_table_is_the_best_of_all(variant, drafts, budget):
    """Three distributions each. A search, so a miss of 1 % is allowed; two of three are exact."""
    random = np.random.default_rng(drafts * 100 + budget)
    most, exact = drafts + (variant == "o-ptp"), 0
    for concentration in (0.3, 1.0, 3.0):
        accepted = random.dirichlet(np.full(drafts + 1, concentration))
        table = choose_groups(accepted, drafts, budget, variant, drafts + 1)
        assert sum(table.sizes) <= budget and max(table.sizes) <= most
        all_sizes = (s for s in itertools.product(range(most + 1), repeat=drafts + 1) if sum(s) <= budget)
        best = max(expected(accepted, sizes, variant) for sizes in all_sizes)
        assert table.expected_tokens == pytest.approx(expected(accepted, table.sizes, variant), abs=1e-6)
        assert 0.99 * best <= table.expected_tokens <= best + 1e-6
        exact += table.expected_tokens > best - 1e-6
    assert exact >= 2


def test_tables_of_known_distributions():
    """Independent drafts, p = 0.7, at most 19: two passes give 3.33; 90 rows gave the authors' greedy choice 3.15."""
    distribution = independent(0.7, 19)
    values = [choose_groups(distribution, 19, budget, "o-ptp", 20).expected_tokens for budget in (20, 40, 90, 200, 400)]
    assert values == sorted(values)
    assert 3.15 <= values[2] <= 3.33
    assert values[-1] == pytest.approx(sum(0.7**g for g in range(20)), abs=1e-6)  # as many rows as are of use
    assert choose_groups(distribution, 19, 1, "o-ptp", 20).sizes == (0,) * 20  # a row alone drafts nothing
    assert choose_groups(distribution, 19, 1, "c-ptp", 20).sizes == (1,) + (0,) * 19


def test_head_that_is_always_right_gets_all_rows():
    """The chain never leaves K drafts, so all rows belong to the group for K, but the first step starts at none."""
    table = choose_groups([0.0, 0.0, 0.0, 1.0], 3, 100, "c-ptp", 4)
    assert table.sizes == (3, 3, 3, 3) and table.expected_tokens == pytest.approx(4)
    assert choose_groups([0.0, 0.0, 0.0, 1.0], 3, 6, "c-ptp", 4).expected_tokens == pytest.approx(4)


def test_batches_share_the_rows():
    distribution = independent(0.8, 7)
    head = head_of(distribution)
    plan = merged_plan(head, 7, max_num_seqs=20, max_aux_rows=128)
    assert [bucket.max_batch for bucket in plan.buckets] == [2, 4, 8, 16, 20]  # 1 and 2 have all rows of use
    for batch, sizes in plan.buckets:
        assert batch * sum(sizes) <= 128
    values = [expected(np.array(distribution), sizes, "o-ptp") for _, sizes in plan.buckets]
    assert values == sorted(values, reverse=True) and plan.buckets[0].sizes == (8,) * 8
    assert all(bucket.rows <= 10 for bucket in merged_plan(head, 7, 8, 128, rows_per_request=10).buckets)
    assert merged_plan(head, 7, 256, 256).bucket(256) is None  # too large a batch to draft for


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (([0.5, 0.5], 1, 4, "x-ptp", 2), HeadConfigError, "allowed are o-ptp, c-ptp"),
        (([0.5, 0.5], 2, 4, "o-ptp", 2), ServeConfigError, "allowed are 1 to 1"),
        (([0.5, 0.5], 1, -1, "o-ptp", 2), ServeConfigError, "budget=-1"),
        (([0.5, -0.5], 1, 4, "o-ptp", 2), HeadConfigError, "measure the head again"),
        (([], 1, 4, "o-ptp", 2), HeadConfigError, "measure the head again"),
    ],
)
def test_invalid_value_is_refused_in_one_line(given, error, message):
    with pytest.raises(error, match=message) as caught:
        choose_groups(*given)
    assert "\n" not in str(caught.value)
    with pytest.raises(ServeConfigError, match="max_num_seqs=0"):
        merged_plan(head_of([0.5, 0.5]), 1, 0, 8)
