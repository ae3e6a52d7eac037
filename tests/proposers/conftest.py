"""A target and heads for it, to be damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import write_head
from tests.support.models import make_ptp_head, make_target

BACKBONE = {"head": "backbone", "component_rank": 2, "backbone_layers": 1, "backbone_kv_heads": 2}
HEADS: dict[str, dict[str, Any]] = {  # settings of write_head: btree, window 5, 3 components
    "head": {},
    "shared": {"head": "shared"},
    "layered": {"circuit": "ff", "window": 4, "num_components": 1, "lora_layers": 1},
    "backbone": BACKBONE,
    "hosted": {"head": "hosted", "component_rank": 2, "drafter": {"method": "mtp"}},
    "lost": {"head": "hosted", "component_rank": 2, "drafter": {"method": "eagle3", "model": "../nothing"}},
    "uneven": BACKBONE | {"backbone_heads": 3, "backbone_kv_heads": 1},
}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and heads for it: HEADS, o-ptp, late; `vocab` and `hidden` are for other targets."""
    folder = tmp_path_factory.mktemp("made")
    target = make_target(folder / "target", vocab_size=32, seed=0)
    config = target.config.to_dict()
    for name, settings in HEADS.items():
        write_head(folder / name, config, **settings)
    write_head(folder / "vocab", {**config, "vocab_size": 33})
    write_head(folder / "hidden", {**config, "hidden_size": 96})
    for variant in ("o-ptp", "late"):
        make_ptp_head(folder / variant, target, variant, window=5)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "copy"))
