"""A target that bundles a head drafts by default, and its output is the same with every bundled head."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.engine import Call, Engine, run
from vllm_mtpc import demo
from vllm_mtpc.engine import server

PROMPTS = [list(b"def read(path):\n    "), list(b"import os\nimport ")]
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def engine(target: Path, **arguments: object) -> Engine:
    return Engine(str(target), [Call(PROMPTS, [GREEDY] * len(PROMPTS))], {"max_model_len": 128, **arguments})


@pytest.mark.parametrize("runner", ["v1", pytest.param("v2", marks=pytest.mark.slow)])
def test_bundled_head_drafts_and_broken_head_changes_nothing(runner: str, tmp_path: Path) -> None:
    shipping, broken = (Path(shutil.copytree(demo.path("target"), tmp_path / name)) for name in ("shipping", "broken"))
    shutil.copytree(demo.path("btree"), shipping / "mtpc")
    config = Path(shutil.copytree(demo.path("ff"), broken / "mtpc" / "default"), "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 96}))
    engines = {
        "plain": engine(demo.path("target")),
        "shipping": engine(shipping),
        "broken": engine(broken),
        "failing": replace(engine(shipping), injected="does_not_load"),  # once a worker runs
    }
    replies = run(engines, runner, runner == "v2", MTPC_AUTO="1")
    assert all(reply[0].tokens == replies["plain"][0].tokens for reply in replies.values())
    accepted = {name: reply[0].metrics.get(ACCEPTED, 0) for name, reply in replies.items()}
    assert accepted["shipping"] > 0 and not any(accepted[name] for name in ("plain", "broken", "failing"))
    assert not replies["failing"][0].metrics["vllm:spec_decode_num_drafts"] or runner == "v2"  # one step, asynchronous
    metrics = replies["shipping"][0].metrics
    assert 0 < metrics["vllm:spec_decode_steps"] <= GREEDY["max_tokens"] * len(PROMPTS)
    assert "vllm:spec_decode_steps" not in replies["plain"][0].metrics


@pytest.mark.slow
def test_served_target_with_bundled_head_drafts(tmp_path: Path) -> None:
    """`vllm serve TARGET` without an option about drafts."""
    shipping = Path(shutil.copytree(demo.path("target"), tmp_path / "shipping"))
    shutil.copytree(demo.path("btree"), shipping / "mtpc")
    words = [str(shipping), "--dtype", "float32", "--enforce-eager", "--max-model-len", "128"]
    words += ["--kv-cache-memory-bytes", str(1 << 26)]
    log = tmp_path / "log"
    with server.run_server(words, log, {"MTPC_AUTO": "1", "VLLM_LOGGING_LEVEL": "INFO"}) as client:
        outputs = [client.complete({"model": client.model(), "prompt": prompt, **GREEDY})[0] for prompt in PROMPTS]
        accepted = client.acceptance().accepted_tokens
    plain = run({"plain": engine(demo.path("target"))}, "v1")["plain"]
    assert [[tokens] for tokens in outputs] == plain[0].tokens
    assert accepted > 0 and "The target bundles a head" in log.read_text()
