"""The law of sampled text through vLLM's real engine, against enumeration, on both model runners.

law_cases.py has the cases: what is asked together, of which head, and faults that the same code must find with as many
draws. A few are looked at in every run, by the first three tokens; all of them in the nightly one, by all six.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import law_cases, law_table, laws
from tests.support.law_cases import CASES, LENGTH, PROMPT, VOCAB, measure

DRAWS, FEW, FIRST = 20_000, 1_000, 3
FEW_DRAWS = {  # in every run; dropping tokens moves the first three by 0.06 and less, 4,000 draws allow 0.05
    "V1: 13 kinds, btree, good": FEW,
    "V1: fault: the recovered token is dropped": 10_000,
    "13 kinds, btree, bad": FEW,
    "fault: the recovered token is dropped": 4_000,
    "coupled": FEW,
    "fault: coupled, noise of the first row": FEW,
    "backbone": FEW,
    "leaves look at the token before": FEW,
    "V1: leaves look at the token before": FEW,
    "fault: drafts scored without the token before": FEW,
    "drafts within a support": FEW,
    "V1: drafts within a support": FEW,
    "fault: drafts within a support scored as of all tokens": FEW,
    "another head at every step": FEW,
    "V1: another head at every step": FEW,
    "o-ptp": FEW,
    "fault: o-ptp, u squared": FEW,
}


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Callable[..., None]:
    folder = tmp_path_factory.mktemp("law")
    target = law_cases.make_models(folder)

    def check(name: str, count: int, length: int = LENGTH) -> str:
        measured = measure(folder, target, name, count, length)
        measured.check()
        return json.dumps(measured.as_json())

    check.target = target
    return check


def case(name: str) -> Any:
    """A case as a parameter; where it asks all kinds of request or injects a fault, it speaks for the feature page."""
    made = CASES[name]
    column = (
        "mtpc on V1"
        if made.runner == "v1"
        else "ptp on V2"
        if "ptp" in name or made.head in law_cases.PTP
        else "mtpc on V2"
    )
    marks = []
    if made.settings == laws.MIXED and name != "no head":
        marks = [pytest.mark.feature(row, "law", column) for row in laws.FEATURES]
    elif made.head:
        marks = [pytest.mark.feature("temperature", "law", column)]
    return pytest.param(name, id=name, marks=marks)


@pytest.mark.parametrize("name", [case(name) for name in FEW_DRAWS])
def test_law_of_the_first_tokens(check: Any, name: str) -> None:
    check(name, FEW_DRAWS[name], FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("name", [case(name) for name in CASES])
def test_law(check: Any, name: str, record_property: Callable[[str, Any], None]) -> None:
    record_property(law_table.LAW, check(name, DRAWS))


def test_the_table_is_what_was_measured(root: Path) -> None:
    written = (root / "docs" / "internals.md").read_text(encoding="utf-8")
    assert law_table.table() in written, "type: python -m tests.support.law_table --write docs/internals.md"


def test_a_setting_that_is_ignored_would_be_found(check: Any) -> None:
    """The laws are further from the one without the setting than draws may be."""
    plain, *others = (laws.exact_law(check.target, PROMPT, LENGTH, setting) for setting in laws.SETTINGS.values())
    for (name, setting), law in zip(list(laws.SETTINGS.items())[1:], others, strict=True):
        assert np.isclose(law.sum(), 1)
        if setting.seed is None:
            assert np.abs(law - plain).sum() / 2 > laws.noise_floor(law, DRAWS), name
            few, few_plain = (laws.of_the_first(each, FIRST, VOCAB) for each in (law, plain))
            assert np.abs(few - few_plain).sum() / 2 > laws.noise_floor(few, FEW), name
