"""The arithmetic of the peers' tables, on two decodings whose numbers are written down."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.peers import tables

TASKS = ["qa", "qa", "rag"]
OURS = {"name": tables.OURS, "tasks": TASKS, "t1": [[6, 4], [6, 4], [8, 2]], "t0": [[4, 4], [4, 4], [4, 4]]}
OTHER = {"name": "other", "tasks": TASKS, "t1": [[4, 4], [8, 4], [4, 4]], "t0": [[8, 4], [8, 4], [8, 4]]}


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = [OURS | {"draft_ms": 2.0, "step_ms": 10.0}, OTHER | {"draft_ms": 5.0, "step_ms": 10.0}]
    monkeypatch.setattr(tables, "rows", lambda: timed)


@pytest.mark.usefixtures("two")
def test_tokens_per_step_is_that_of_all_questions_and_differences_are_paired() -> None:
    assert tables.shown(OURS, "t1") == "2.00 ± 0.60"  # 20 tokens in 10 steps; (-2, -2, 4) / 10 by question
    # 16 / 12 - 2; by question (-1.333, 2.667, -1.333) / 12 - (-2, -2, 4) / 10
    assert tables.shown(OTHER, "t1") == f"1.33 (-0.67 ± {np.sqrt(1.5 * (0.0889**2 + 0.4222**2 + 0.5111**2)):.2f})"
    assert tables.shown(OTHER, "t0", "qa").startswith("2.00 (+1.00 ")


@pytest.mark.usefixtures("two")
def test_rates_divide_by_the_milliseconds_of_a_draft() -> None:
    ours, other = tables.rates().splitlines()[2:]
    assert ours == f"| {tables.OURS} | 0.750 | 2.000 |" and other == "| other | 0.300 | 0.200 |"
