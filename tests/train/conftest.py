"""What training runs start from: a byte target with a tokenizer and text, a target of twelve tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.demo.byte_target import build_tokenizer
from tests.support.models import make_target
from tests.support.training import V
from vllm_mtpc.hf import Target, load_target

WORDS = "the cat sat on the mat and the dog sat on the cat while the rat ran from the mat to the hat. "


@pytest.fixture(scope="module", name="place")
def fixture_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    make_target(folder / "target", 257, seed=3, hidden_size=32, layers=2)
    build_tokenizer().save_pretrained(folder / "target")
    lines = [{"text": WORDS[start : start + 60 + 3 * start]} for start in range(0, 24)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("tiny") / "target"
    make_target(folder, V, seed=1, hidden_size=32)
    return load_target(folder)
