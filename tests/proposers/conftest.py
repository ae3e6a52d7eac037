"""A target and heads for it, to be damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import engine_config, write_head
from tests.support.models import make_ptp_head, make_target

LM_HEAD = {"kind": "lm_head", "component_rank": 2}
BACKBONE = {"trunk": {"kind": "backbone", "layers": 1, "kv_heads": 2}, "leaves": LM_HEAD}
HEADS: dict[str, dict[str, Any]] = {  # settings of write_head: btree, window 5, 3 components
    "head": {},
    "shared": {"leaves": {"kind": "lm_head"}},
    "mlp": {"trunk": {"kind": "mlp"}},
    "layered": {
        "circuit": "ff",
        "window": 4,
        "num_components": 1,
        "trunk": {"kind": "lora", "layers": 1, "rank": 4, "alpha": 8.0},
    },
    "backbone": BACKBONE,
    "hosted": {"trunk": {"kind": "drafter"}, "leaves": LM_HEAD},
    "lost": {"trunk": {"kind": "drafter", "method": "eagle3", "model": "../nothing"}, "leaves": LM_HEAD},
    "uneven": BACKBONE | {"trunk": {"kind": "backbone", "layers": 1, "heads": 3, "kv_heads": 1}},
}


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, heads for it (HEADS, o-ptp, late, damaged), and `vocab` of another target."""
    folder = tmp_path_factory.mktemp("made")
    target = make_target(folder / "target", vocab_size=32, seed=0)
    config = target.config.to_dict()
    for name, settings in HEADS.items():
        write_head(folder / name, config, **settings)
    damaged = Path(shutil.copytree(folder / "head", folder / "damaged")) / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-8])
    write_head(folder / "vocab", {**config, "vocab_size": 33})
    for variant in ("o-ptp", "late"):
        make_ptp_head(folder / variant, target, variant, window=5)
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


def rewrite(file: Path, **changes: Any) -> None:
    values = json.loads(file.read_text())
    merged = {name: values[name] | value for name, value in changes.items() if isinstance(value, dict)}
    file.write_text(json.dumps(values | changes | merged))


def set_runner(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    import vllm.config.vllm

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(version - 1))
    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", True)  # required by a V2 config; nothing runs here


def configured(place: Path, head: str = "head", engine: dict[str, Any] | None = None, /, **options: Any) -> Any:
    """Return the configuration of an engine with this head and these options of `speculative_config`."""
    method = "ptp" if head in ("o-ptp", "late") else "mtpc"
    return engine_config(place / "target", {"method": method, "model": str(place / head), **options}, **(engine or {}))
