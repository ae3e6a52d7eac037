"""What all tests share: markers and order of the tests, the folder of shared data, calm defaults for engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import forks

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
# Folders and files whose tests take longest.
LONGEST = ("docs", "e2e", "eval", "gpu_rehearsal", "kernels", "models", "operate", "ray", "regenerate", "train")
LONGEST = tuple(f"tests/{name}" for name in (*LONGEST, "test_packaging", "test_types"))
for _name, _value in ENGINE_DEFAULTS.items():
    os.environ.setdefault(_name, _value)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: over a minute, or many engines; scripts/test.sh runs it only with --all")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that workers end together. A file of the run says which tests are slow."""
    for item in items:
        item.user_properties += [("slow", True)] * bool(item.get_closest_marker("slow"))
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    forks.inspect_models_here()


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT
