"""Engines that measure how much memory is left for the KV cache, as those without --kv-cache-memory-bytes do on a GPU.

vLLM then makes two caches: one of a block per sequence, in which graphs are captured, and the one that serves.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import backbones
from tests.support.engine import Engine, Reply, ask, build, run
from tests.support.models import make_head, make_ptp_head, make_target, random_layers
from tests.support.pieces import PROMPTS, SMALL, VOCAB
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head

SPEC: dict[str, dict[str, Any]] = {  # by head
    "linear": {},
    "draft layers": {},
    "backbone": {},
    "o-ptp": {"method": "ptp"},
    "o-ptp merged": {"method": "ptp", "draft_pass": "merged", "max_aux_rows": 64},
}
HAVE_GRAPHS = SPEC.keys() - {"o-ptp merged"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    target = make_target(folder / "target", VOCAB, seed=3)
    make_head(folder / "linear", target, "btree", 4, 2)
    shutil.copytree(folder / "target", folder / "shipping")
    shutil.copytree(folder / "linear", folder / "shipping" / "mtpc")
    layers = random_layers(folder / "target", 1, scale=0.02)
    sizes = {"circuit": "btree", "window": 4, "num_components": 2, "target": target.config, "verifier": "../target"}
    config = HeadConfig.create(**sizes, lora_layers=1)
    save_head(folder / "draft layers", config, build_head(config), {}, "made by a test", draft_layers=layers)
    texts = [prompt + backbones.Target(folder / "target", []).greedy(prompt, 6) for prompt in PROMPTS]
    backbones.fit(folder / "backbone", folder / "target", texts, steps=3)
    make_ptp_head(folder / "o-ptp", target, "o-ptp", 5, scale=0.01)
    return folder


def engine(folder: Path, name: str | None = None) -> Engine:
    spec = {"num_speculative_tokens_per_batch_size": "off", **SPEC.get(name, {})}
    head, measured = name and name.removesuffix(" merged"), {"kv_cache_memory_bytes": None}
    arguments = {**SMALL, **measured, "gpu_memory_utilization": 0.01}
    return build(folder, head, [ask(PROMPTS, 6)], "measured_as_on_a_gpu", spec, **arguments)


def replies(folder: Path, runner: str, names: list[str]) -> dict[str, Reply]:
    engines = {"plain": engine(folder), **{name: engine(folder, name) for name in names}}
    shipping = replace(engines["plain"], model=str(folder / "shipping"))
    engines |= {"bundled": shipping, "failing": replace(shipping, injected="first_draft_fails")}
    return {name: reply for name, (reply,) in run(engines, runner, MTPC_AUTO="1").items()}


@pytest.fixture(scope="module")
def on_v2(folder: Path) -> dict[str, Reply]:
    return replies(folder, "v2", list(SPEC))


@pytest.fixture(scope="module")
def on_v1(folder: Path) -> dict[str, Reply]:
    return replies(folder, "v1", ["linear"])


@pytest.mark.parametrize(("runner", "name"), [("v1", "linear"), *(("v2", name) for name in SPEC)])
def test_engine_starts_without_a_given_cache_size(runner: str, name: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue(f"on_{runner}")
    assert found[name].tokens == found["plain"].tokens
    assert found[name].steps > 0
    if runner == "v2":
        ((blocks, graphs),) = found[name].recorded
        assert blocks == SMALL["max_num_seqs"] and (graphs > 0) == (name in HAVE_GRAPHS)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_bundled_head_drafts_once_before_the_target_serves(runner: str, request: pytest.FixtureRequest) -> None:
    """A head whose first draft raises is given up at start: the engine answers, and nothing drafts."""
    found = request.getfixturevalue(f"on_{runner}")
    assert found["failing"].tokens == found["bundled"].tokens == found["plain"].tokens
    assert found["bundled"].accepted > 0
    assert found["failing"].steps <= (len(PROMPTS) if runner == "v2" else 0)  # one step, planned asynchronously
    assert found["failing"].recorded.count("drafted") == 1  # one attempt, before the first request
