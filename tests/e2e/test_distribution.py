"""The distribution of sampled text through vLLM's real engine, against enumeration, on both model runners.

distribution_cases.py has the cases: what is asked together, of which head, and faults that the same code must find
with as many
draws. A few are looked at in every run, by the first three tokens; all of them in the nightly one, by all six.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM

from tests.support import distribution_cases, distribution_table, distributions
from tests.support.distribution_cases import CASES, LENGTH, PROMPT, VOCAB, measure
from tests.support.distributions import exact_distribution, noise_floor, of_the_first

DRAWS, FEW, FIRST = 20_000, 1_000, 3
FEW_DRAWS = {  # in every run; dropping tokens moves the first three by 0.06 and less, 4,000 draws allow 0.05
    "V1: 13 kinds, btree, good": FEW,
    "V1: fault: the recovered token is dropped": 10_000,
    "13 kinds, btree, bad": FEW,
    "fault: the recovered token is dropped": 4_000,
    "coupled": FEW,
    "fault: coupled, noise of the first row": FEW,
    "leaves look at the token before": FEW,
    "V1: leaves look at the token before": FEW,
    "fault: drafts scored without the token before": FEW,
    "another head at every step": FEW,
    "o-ptp": FEW,
    "fault: o-ptp, u squared": FEW,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    folder = tmp_path_factory.mktemp("distribution")
    return folder, distribution_cases.make_models(folder)


def case(name: str) -> Any:
    """A case as a parameter; where it asks all kinds of request or injects a fault, it speaks for the feature page."""
    made = CASES[name]
    is_ptp = "ptp" in name or made.head in distribution_cases.PTP
    column = "mtpc on V1" if made.runner == "v1" else "ptp on V2" if is_ptp else "mtpc on V2"
    marks = []
    if made.settings == distributions.MIXED and name != "no head":
        marks = [pytest.mark.feature(row, "distribution", column) for row in distributions.FEATURES]
    elif made.head:
        marks = [pytest.mark.feature("temperature", "distribution", column)]
    return pytest.param(name, id=name, marks=marks)


@pytest.mark.parametrize("name", [case(name) for name in FEW_DRAWS])
def test_distribution_of_the_first_tokens(place: tuple[Path, LlamaForCausalLM], name: str) -> None:
    measure(*place, name, FEW_DRAWS[name], FIRST).check()


@pytest.mark.slow
@pytest.mark.parametrize("name", [case(name) for name in CASES])
def test_distribution_of_all_tokens(place: Any, name: str, record_property: Callable[[str, Any], None]) -> None:
    measured = measure(*place, name, DRAWS)
    measured.check()
    record_property(distribution_table.DISTRIBUTION, json.dumps(measured.as_json()))


def test_table_of_distributions_is_current(root: Path) -> None:
    written = (root / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    assert distribution_table.table() in written, (
        "type: python -m tests.support.distribution_table --write benchmarks/RESULTS.md"
    )


def test_ignored_setting_would_be_found(place: tuple[Path, LlamaForCausalLM]) -> None:
    """The distributions are further from the one without the setting than draws may be."""
    kinds = distributions.SETTINGS
    plain, *others = (exact_distribution(place[1], PROMPT, LENGTH, setting) for setting in kinds.values())
    for (name, setting), distribution in zip(list(kinds.items())[1:], others, strict=True):
        assert np.isclose(distribution.sum(), 1)
        if setting.seed is None:
            assert np.abs(distribution - plain).sum() / 2 > noise_floor(distribution, DRAWS), name
            few, few_plain = (of_the_first(each, FIRST, VOCAB) for each in (distribution, plain))
            assert np.abs(few - few_plain).sum() / 2 > noise_floor(few, FEW), name
