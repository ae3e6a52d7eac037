"""docs/features.md is what the tests say: every named test exists, and the page is the one that would be written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.e2e import features
from tests.e2e.test_matrix import ROWS


@pytest.mark.parametrize("test", features.named())
def test_a_named_test_exists(test: str) -> None:
    file, function = test.split("::")
    assert function in features.functions(file)


def test_cells_say_what_they_rest_on() -> None:
    for feature, row in features.FEATURES.items():
        assert len(row) == len(features.COLUMNS), feature
        for cell in row:
            assert cell.kind in features.TITLES, feature
            assert cell.why if cell.kind == "untested" else cell.tests, feature


def test_rows_of_the_batch_are_in_it() -> None:
    assert set(features.BATCHED) <= set(ROWS)


def test_the_page_is_the_one_that_would_be_written(root) -> None:
    written = (root / "docs" / "features.md").read_text(encoding="utf-8")
    assert written == features.page(), "type: python -m tests.e2e.features --write docs/features.md"


def test_v1_is_kept_synchronous() -> None:
    from vllm_mtpc.proposers.seam.frontend import check_runner

    spec = SimpleNamespace(
        method="mtpc", head=SimpleNamespace(head="linear", lora_layers=0), rejection_sample_method="standard"
    )
    config = SimpleNamespace(
        speculative_config=spec,
        use_v2_model_runner=False,
        scheduler_config=SimpleNamespace(async_scheduling=True),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        lora_config=None,
    )
    check_runner(config)
    assert config.scheduler_config.async_scheduling is False
