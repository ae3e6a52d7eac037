"""A target and heads for it, to be damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.configs import write_head
from tests.support.models import make_ptp_head, make_target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and its heads `head` (btree, window 5, 3 components) and `ptp` (o-ptp, window 5)."""
    folder = tmp_path_factory.mktemp("made")
    target = make_target(folder / "target", vocab_size=32, seed=0)
    write_head(folder / "head", target.config.to_dict())
    make_ptp_head(folder / "ptp", target, "o-ptp", window=5)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "copy"))
