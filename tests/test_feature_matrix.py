"""docs/features.md is what a run of the tests found, and a cell is as good as the tests that have passed."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch  # noqa: F401  pytester forgets what is first imported in its runs, and torch cannot be imported twice

from tests.support import features, outcome

pytest_plugins = ["pytester"]


@pytest.fixture(name="kept")
def fixture_kept() -> dict[str, Any]:
    return json.loads(outcome.KEPT.read_text(encoding="utf-8"))


def test_the_page_is_what_the_kept_run_found(root: Path, kept: dict[str, Any]) -> None:
    written = (root / "docs" / "features.md").read_text(encoding="utf-8")
    assert written == features.page(kept), "type: python -m tests.support.features --write docs/features.md"


def test_named_tests_exist(root: Path, kept: dict[str, Any]) -> None:
    for test in {cell["test"] for cell in kept["cells"]}:
        file, _, function = test.partition("::")
        tree = ast.parse((root / "tests" / file).read_text(encoding="utf-8"))
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def a_run(**ended: int) -> dict[str, Any]:
    cell = {
        "feature": "top_k",
        "column": "mtpc on V1",
        "kind": "distribution",
        "why": "",
        "test": "e2e/test_x.py::test_y",
    }
    return {
        "time": "2026-01-02T03:04:05+00:00",
        "commit": "abc",
        "versions": {"vllm": "0.32.0"},
        "passed": 1,
        "failed": [],
        "skipped": {},
        "cells": [{**cell, "passed": 0, "failed": 0, "skipped": 0, **ended}],
    }


@pytest.mark.parametrize(
    ("ended", "shown"),
    [
        ({"passed": 2, "skipped": 1}, "distribution [1]"),
        ({"skipped": 2}, "not tested: no test of it has run"),
        ({"passed": 2, "failed": 1}, "**failed** [1]"),
    ],
)
def test_only_a_passed_test_is_a_claim(ended: dict[str, int], shown: str) -> None:
    text = features.page(a_run(**ended))
    assert f"| top_k | {shown} | not tested: no test of it has run |" in text
    assert "2026-01-02, commit `abc`" in text


def test_a_run_is_kept(pytester: pytest.Pytester) -> None:
    """What the plugin writes: counts, reasons, failures, seconds by file, and cells with how their cases ended."""
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.feature("top_k", "distribution", "mtpc on V1")
        @pytest.mark.parametrize("number", [1, 2, 3])
        def test_cases(number):
            if number == 3:
                pytest.skip("three is too many")
            assert number == 1

        @pytest.mark.slow
        @pytest.mark.column("mtpc on V2")
        @pytest.mark.feature("seed: the same text in any batch", "exact", why="some")
        def test_passes():
            pass
        """
    )
    file = pytester.path / "kept.json"
    pytester.runpytest_inprocess("--outcome", str(file), "-p", "no:cacheprovider").assert_outcomes(2, 1, 1)
    kept = json.loads(file.read_text())
    assert (kept["passed"], len(kept["failed"])) == (2, 1) and list(kept["skipped"]) == ["three is too many"]
    assert set(kept["seconds"]) == {"test_a_run_is_kept.py"}
    distribution, exact = sorted(kept["cells"], key=lambda cell: cell["feature"], reverse=True)
    assert (distribution["passed"], distribution["failed"], distribution["skipped"]) == (1, 1, 1) and distribution[
        "test"
    ].endswith("::test_cases")
    assert (exact["column"], exact["why"], exact["passed"]) == ("mtpc on V2", "some", 1)


def test_a_row_that_the_page_lacks_is_refused() -> None:
    marks = {"feature": [pytest.mark.feature("top_q", "distribution", "mtpc on V1").mark], "column": []}
    item = SimpleNamespace(nodeid="test", iter_markers=marks.__getitem__)
    with pytest.raises(pytest.UsageError, match="top_q"):
        features.cells_of(item)


@pytest.mark.feature("asynchronous scheduling", "off", "mtpc on V1", why="V1 drafts from token lists on the host")
def test_v1_is_kept_synchronous() -> None:
    from vllm_mtpc.proposers.config.mtpc import MtpcSpeculativeConfig

    spec = SimpleNamespace(
        method="mtpc",
        head=SimpleNamespace(head="linear", lora_layers=0),
        aux_layers=(),
        rejection_sample_method="standard",
        min_survival=None,
        verify=None,
        has_default_schedule=True,
        num_speculative_tokens_per_batch_size=[(1, 8, 3)],
    )
    config = SimpleNamespace(
        speculative_config=spec,
        use_v2_model_runner=False,
        scheduler_config=SimpleNamespace(async_scheduling=True),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        structured_outputs_config=SimpleNamespace(backend="auto"),
        lora_config=None,
    )
    MtpcSpeculativeConfig.check_engine(spec, config)
    assert config.scheduler_config.async_scheduling is False
    assert spec.num_speculative_tokens_per_batch_size is None  # the worker plans by what it observes
