"""Engines that measure how much memory is left for the KV cache, and heads in a target's folder.

Without --kv-cache-memory-bytes, as on a GPU, vLLM makes two caches: one of a block per sequence, in which graphs are
captured, and the one that serves.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import backbones
from tests.support.engine import Engine, Reply, ask, build, run
from tests.support.models import lora_section, make_head, make_ptp_head, make_target, random_layers
from tests.support.requests import PROMPTS, SMALL, VOCAB
from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads.head import build_head

SPEC: dict[str, dict[str, Any]] = {  # by head of Model Runner V2
    "draft layers": {},
    "backbone": {},
    "o-ptp": {"method": "ptp"},
    "o-ptp merged": {"method": "ptp", "draft_pass": "merged", "max_aux_rows": 64},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    target = make_target(folder / "target", VOCAB, seed=3)
    shutil.copytree(folder / "target", folder / "bundled")
    make_head(folder / "bundled" / "mtpc", target, "btree", 4, 2)
    adapters = random_layers(folder / "target", 1, scale=0.02).adapters
    sizes = {"circuit": "btree", "window": 4, "num_components": 2, "target": target.config, "verifier": "../target"}
    config = HeadConfig.create(**sizes, trunk=lora_section(adapters))
    save_head(folder / "draft layers", config, build_head(config), {}, "made by a test", adapters=adapters)
    texts = [prompt + backbones.Target(folder / "target", []).greedy(prompt, 6) for prompt in PROMPTS]
    backbones.fit(folder / "backbone", folder / "target", texts, steps=3)
    make_ptp_head(folder / "o-ptp", target, "o-ptp", 5, scale=0.01)
    return folder


def engine(folder: Path, name: str) -> Engine:
    """With the head `name`, or the one in the target's folder."""
    arguments = {**SMALL, "kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.01}
    injected = "measured_as_on_a_gpu"
    if name in SPEC:
        spec = {"num_speculative_tokens_per_batch_size": "off", **SPEC[name]}
        return build(folder, name.removesuffix(" merged"), [ask(PROMPTS, 6)], injected, spec, **arguments)
    made = build(folder, None, [ask(PROMPTS, 6)], injected, **arguments)
    return replace(made, model=str(folder / {"plain": "target"}.get(name, name)))


@pytest.fixture(scope="module", params=["v1", "v2"])
def replies(folder: Path, request: pytest.FixtureRequest) -> dict[str, Reply]:
    names = ["plain", "bundled", *(SPEC if request.param == "v2" else ())]
    found = run({name: engine(folder, name) for name in names}, request.param, MTPC_AUTO="1")
    return {name: reply for name, (reply,) in found.items()}


def test_engine_starts_without_a_given_cache_size(replies: dict[str, Reply]) -> None:
    plain = replies["plain"]
    assert plain.recorded == [] and "vllm:spec_decode_steps" not in plain.metrics
    for name in ["bundled", *(replies.keys() & SPEC)]:
        reply = replies[name]
        assert reply.tokens == plain.tokens and 0 < reply.metrics["vllm:spec_decode_steps"] <= 6 * len(PROMPTS), name
        if "backbone" in replies:  # Model Runner V2
            ((blocks, graphs),) = reply.recorded
            assert blocks == SMALL["max_num_seqs"] and (graphs > 0) == (name != "o-ptp merged"), name
    assert replies["bundled"].accepted > 0
