"""A short training on the demo corpus orders the circuits by their expressiveness."""

from __future__ import annotations

import json

import pytest

from benchmarks.demo import corpus
from vllm_mtpc import demo
from vllm_mtpc.cli import main

STEPS = 300


@pytest.mark.slow
def test_btree_beats_cp_beats_ff(tmp_path):
    """Three trainings of 300 steps, minutes on a CPU; seeds are fixed, and the gaps are several standard errors."""
    corpus.write_jsonl(corpus.load(), tmp_path)
    found = {}
    for circuit, components in (("ff", 1), ("cp", 8), ("btree", 8)):
        words = ["--target", str(demo.path("target")), "--circuit", circuit, "--components", str(components)]
        words += ["--data", str(tmp_path / "valid.jsonl"), "--out", str(tmp_path / circuit)]
        words += ["--window", "8", "--max-steps", str(STEPS), "--windows-per-step", "384", "--learning-rate", "0.005"]
        words += ["--seq-len", "256", "--evaluation-sequences", "192", "--block-rows", "400", "--device", "cpu"]
        assert main(["train", *words]) == 0
        found[circuit] = json.loads((tmp_path / circuit / "provenance.json").read_text())["figures"]["t1"]
    figures = {circuit: values["tokens_per_step"] for circuit, values in found.items()}
    assert figures["btree"] > figures["cp"] + 2 * found["cp"]["standard_error"], figures
    assert figures["cp"] > figures["ff"] + 2 * found["ff"]["standard_error"], figures
