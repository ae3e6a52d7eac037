"""Engines of a target that ships a head: it drafts unasked, and the output stays the target's whatever is shipped."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.e2e.engine import Call, Engine, run
from vllm_mtpc import demo

PROMPTS = [list(b"def read(path):\n    "), list(b"import os\nimport ")]
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def engine(target: Path, **arguments: object) -> Engine:
    return Engine(str(target), [Call(PROMPTS, [GREEDY] * len(PROMPTS))], {"max_model_len": 128, **arguments})


def test_a_shipped_head_drafts_and_a_broken_one_does_not_matter(tmp_path: Path) -> None:
    shipping, broken = (Path(shutil.copytree(demo.path("target"), tmp_path / name)) for name in ("shipping", "broken"))
    shutil.copytree(demo.path("btree"), shipping / "mtpc")
    config = Path(shutil.copytree(demo.path("ff"), broken / "mtpc" / "default"), "config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 96}))
    engines = {
        "plain": engine(demo.path("target")),
        "shipping": engine(shipping),
        "broken": engine(broken),
    }
    replies = {
        name: reply for name, reply in run(engines, "v1", VLLM_MTPC_AUTO="1").items() if not isinstance(reply, str)
    }
    assert replies.keys() == engines.keys()
    assert all(reply[0].tokens == replies["plain"][0].tokens for reply in replies.values())
    accepted = {name: reply[0].metrics.get(ACCEPTED, 0) for name, reply in replies.items()}
    assert accepted["shipping"] > 0 and not accepted["broken"] and not accepted["plain"]
