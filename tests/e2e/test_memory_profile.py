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
from tests.support.engine import Engine, Reply, run
from tests.support.models import make_head, make_ptp_head, make_target, random_layers
from tests.support.pieces import PROMPTS, SMALL, VOCAB, ask
from tests.support.requests import ACCEPTED
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head

CALLS = [ask(PROMPTS, 6)]
SEQUENCES = SMALL["max_num_seqs"]
FULL = {"num_speculative_tokens_per_batch_size": "off"}
HEADS: dict[str, dict[str, Any]] = {  # by name: its folder's, and options
    "linear": {"method": "mtpc", **FULL},
    "draft layers": {"method": "mtpc", **FULL},
    "backbone": {"method": "mtpc", **FULL},
    "o-ptp": {"method": "ptp", **FULL},
    "o-ptp merged": {"method": "ptp", "draft_pass": "merged", "max_aux_rows": 64},
}
HAVE_GRAPHS = HEADS.keys() - {"o-ptp merged"}


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


def engine(folder: Path, name: str = "") -> Engine:
    arguments: dict[str, Any] = {**SMALL, "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.01}
    if name:
        arguments["speculative_config"] = {**HEADS[name], "model": str(folder / name.removesuffix(" merged"))}
    return Engine(str(folder / "target"), CALLS, arguments, "measured_as_on_a_gpu")


def replies(folder: Path, runner: str, names: list[str]) -> dict[str, Reply]:
    engines = {name: engine(folder, name) for name in ["", *names]}
    shipping = replace(engines[""], model=str(folder / "shipping"))
    engines |= {"bundled": shipping, "failing": replace(shipping, injected="first_draft_fails")}
    found = run(engines, runner, async_scheduling=runner == "v2", MTPC_AUTO="1")
    return {name: reply[0] for name, reply in found.items()}


@pytest.fixture(scope="module")
def on_v2(folder: Path) -> dict[str, Reply]:
    return replies(folder, "v2", list(HEADS))


@pytest.fixture(scope="module")
def on_v1(folder: Path) -> dict[str, Reply]:
    return replies(folder, "v1", ["linear"])


@pytest.mark.parametrize("name", HEADS)
def test_engine_starts_without_a_given_cache_size_on_v2(on_v2: dict[str, Reply], name: str) -> None:
    assert on_v2[name].tokens == on_v2[""].tokens
    assert on_v2[name].metrics["vllm:spec_decode_num_drafts"] > 0
    ((blocks, graphs),) = on_v2[name].recorded
    assert blocks == SEQUENCES and (graphs > 0) == (name in HAVE_GRAPHS)


def test_engine_starts_without_a_given_cache_size_on_v1(on_v1: dict[str, Reply]) -> None:
    assert on_v1["linear"].tokens == on_v1[""].tokens
    assert on_v1["linear"].metrics["vllm:spec_decode_num_drafts"] > 0


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_bundled_head_drafts_once_before_the_target_serves(runner: str, request: pytest.FixtureRequest) -> None:
    """A head whose first draft raises is given up at start: the engine answers, and nothing drafts."""
    found = request.getfixturevalue(f"on_{runner}")
    assert found["failing"].tokens == found["bundled"].tokens == found[""].tokens
    assert found["bundled"].metrics[ACCEPTED] > 0
    drafts = found["failing"].metrics.get("vllm:spec_decode_num_drafts", 0)
    assert drafts <= (len(PROMPTS) if runner == "v2" else 0)  # one step, which asynchronous scheduling has planned
    assert found["failing"].recorded.count("drafted") == 1  # one attempt, before the first request
