"""What all tests share: markers and order of the tests, the folder of shared data, calm defaults for engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import features, outcome

ROOT = Path(__file__).parents[1]

# Engines that a test starts in its own process: no second process (3 s to start in place of 20), little output, no
# look at the network. A test that needs something else sets it for the process it starts.
ENGINE_DEFAULTS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Two OpenMP threads that wait for each other on a busy machine of two cores can be 40 times slower than one.
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) - 1)),
}
for _name, _value in ENGINE_DEFAULTS.items():
    os.environ.setdefault(_name, _value)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--outcome", type=Path, metavar="FILE", help="keep what this run finds as JSON (tests/support/outcome.py)"
    )
    parser.addoption("--distributions", type=Path, metavar="FILE", help="keep measured distributions as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: over a minute, or many engines; scripts/test.sh runs it only with --all")
    config.addinivalue_line("markers", "column(*names): columns of benchmarks/FEATURES.md that the test speaks for")
    config.addinivalue_line(
        "markers", "feature(name, kind, *columns, why=''): a row of benchmarks/FEATURES.md, see there"
    )
    file = config.getoption("--outcome")
    if file and not hasattr(config, "workerinput"):
        config.pluginmanager.register(outcome.Outcome(file))


@pytest.hookimpl(trylast=True)  # when what is not selected is gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cells of the feature page travel with the reports; the longest files come first, so that workers end together."""
    kinds: dict[str, set[str]] = {}
    for item in items:
        item.user_properties += [(outcome.CELL, cell) for cell in features.cells_of(item)]
        kinds.setdefault(_file(item), set()).add("slow" if item.get_closest_marker("slow") else "fast")
    seconds = {file: outcome.seconds_of(file, selected) for file, selected in kinds.items()}
    items.sort(key=lambda item: (-seconds[_file(item)], _file(item)))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT
