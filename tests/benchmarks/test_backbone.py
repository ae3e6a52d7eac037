"""Circuits on a frozen backbone: every circuit is trained, measured and timed."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import backbone
from tests.support.models import make_target
from vllm_mtpc.cli import main

torch.set_num_threads(1)


def drafter(folder: Path) -> list[str]:
    """The words that name an untrained drafter, its target and its data."""
    make_target(folder / "target", 16, seed=1, hidden_size=32)
    lines = [{"prompt_ids": [1, 2], "response_ids": [(3 * i + k) % 16 for k in range(60)]} for i in range(8)]
    (folder / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["--target", str(folder / "target"), "--data", str(folder / "d.jsonl")]
    sizes = ["--window", "3", "--backbone-layers", "1", "--backbone-width", "32"]
    untrained = ["--head", "backbone", "--circuit", "ff", "--dry-run", "--out", str(folder / "drafter")]
    assert main(["train", *given, *sizes, *untrained]) == 0
    return [str(folder / "drafter"), *given, "--validation-data", str(folder / "d.jsonl")]


def test_every_circuit_learns_on_the_drafter_s_states(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(backbone, "CIRCUITS", ("ff", "btree"))
    words = drafter(tmp_path)
    sizes = ["--components", "2", "--component-rank", "2", "--steps", "4", "--windows", "16", "--sequences", "2"]
    assert backbone.main([*words, *sizes, "--json", str(tmp_path / "table.json")]) == 0
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    told = [(row["circuit"], row["components"], row["token_rank"], row["steps"]) for row in rows]
    assert told == [("ff", 1, 0, 0), ("ff", 1, 32, 4), ("btree", 2, 0, 4), ("btree", 2, 32, 4)]
    found = [row["t1"]["tokens_per_step"] for row in rows]
    assert min(found[1:]) != found[0] and all(row["draft_ms"][0] > 0 for row in rows)
    assert f"{found[3]:.3f}" in capsys.readouterr().out


def test_bad_input_is_one_line(tmp_path, capsys):
    words = ["--target", str(tmp_path), "--data", "d", "--validation-data", "d"]
    assert backbone.main([str(tmp_path / "none"), *words]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
