"""A head after a sleep of level 2, of which vLLM saves the buffers of the speculator's model only.

Here every tensor that loading a speculator allocated is zeroed, then those buffers are copied back as `Worker.wake_up`
does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import forks
from tests.support.configs import engine_config, write_head
from tests.support.models import make_ptp_head, make_target, random_layers
from tests.support.speculators import CPU
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head

HEADS: dict[str, dict[str, Any]] = {
    "linear": {"method": "mtpc"},
    "shared": {"method": "mtpc"},
    "draft layers": {"method": "mtpc"},
    "o-ptp": {"method": "ptp", "draft_pass": "two-pass"},
    "late": {"method": "ptp", "draft_pass": "merged"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sleep")
    target = make_target(folder / "target", vocab_size=32, seed=0)
    sizes = target.config.to_dict()
    torch.manual_seed(2)
    write_head(folder / "linear", sizes)
    write_head(folder / "shared", sizes, head="shared")
    config = HeadConfig.create(
        circuit="cp", window=3, num_components=2, target=sizes, verifier="../target", lora_layers=1
    )
    layers = random_layers(folder / "target", 1)
    save_head(folder / "draft layers", config, build_head(config), {}, "card", torch.float32, layers)
    make_ptp_head(folder / "o-ptp", target, "o-ptp", 4)
    make_ptp_head(folder / "late", target, "late", 4, late_width=3)
    return folder


def lost(place: Path, names: list[str]) -> dict[str, list[Any]]:
    """In a fork, by head: the number of storages that loading allocated, and sizes of those that a sleep changes."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.v1.worker.gpu_worker import init_worker_distributed_environment

    found = {}
    for name in names:
        given = {"model": str(place / name), **HEADS[name]}
        config = engine_config(place / "target", given, enforce_eager=True)
        with set_current_vllm_config(config):
            if not found:
                init_worker_distributed_environment(config, 0, "tcp://127.0.0.1:0", 0, "gloo")
            target = initialize_model(config)
            found[name] = _lost(lambda config=config, target=target: _load(config, target))
    return found


def _load(config: Any, target: Any) -> Any:
    from vllm_mtpc.proposers.v2.model_runner_v2 import speculator_class

    made = speculator_class(config.speculative_config)(config, CPU)
    before = _tensors()
    made.load_model(target)
    return made, before


def _lost(load: Callable[[], Any]) -> list[Any]:
    made, before = load()
    left = {key: part for key, part in _tensors().items() if key not in before}
    saved = {name: part.clone() for name, part in made.model.named_buffers()}
    were = {key: part.clone() for key, part in left.items()}
    for part in left.values():
        part.zero_()
    for name, part in made.model.named_buffers():
        part.data.copy_(saved[name])
    return [len(left), [part.numel() for key, part in left.items() if not torch.equal(part, were[key])]]


def _tensors() -> dict[int, Tensor]:
    """The bytes of every storage that a tensor has."""
    gc.collect()
    parts = [part for part in gc.get_objects() if isinstance(part, Tensor) and part.device == CPU and part.numel()]
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage() for part in parts}
    return {key: torch.empty(0, dtype=torch.uint8).set_(storage) for key, storage in storages.items()}


@pytest.mark.parametrize("name", HEADS)
def test_head_is_kept_after_sleep(place: Path, name: str) -> None:
    ((count, changed),) = forks.call("v2", "tests.proposers.test_sleep:lost", place, [name]).values()
    assert count > 3 and changed == []
