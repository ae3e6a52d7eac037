"""The sweep trains what its file says, once, and tells what the runs wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import sweep
from tests.support.models import make_target
from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.train.trainer import Trainer

FILE = """
title: Two circuits
common: {{target: {target}, data: [{data}], window: 3, max_steps: 3, windows_per_step: 32, seq_len: 32, device: cpu,
         evaluation_sequences: 4, evaluation_prompt_tokens: 4, evaluation_tokens: 10, components: 2}}
runs:
  one: {{circuit: cp}}
  two: {{circuit: hmm, components: 3}}
"""
PTP = """
title: PTP next to a circuit
common: {{target: {target}, data: [{data}], window: 3, max_steps: 2, windows_per_step: 16, seq_len: 32, device: cpu,
         evaluation_sequences: 4, evaluation_prompt_tokens: 4, evaluation_tokens: 10}}
runs:
  circuit: {{circuit: ff}}
  ptp: {{head: ptp, lora_rank: 2}}
"""


def plan(folder: Path, text: str) -> Path:
    """A plan's file next to its target and data."""
    make_target(folder / "target", 16, seed=1, hidden_size=32)
    lines = [{"prompt_ids": [1, 2], "response_ids": [(3 * i + k) % 16 for k in range(20)]} for i in range(8)]
    (folder / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = folder / "plan.yaml"
    file.write_text(text.format(target=folder / "target", data=folder / "d.jsonl"))
    return file


def test_ptp_runs_are_trained_once_and_told(tmp_path, capsys, monkeypatch):
    file = plan(tmp_path, PTP)
    words = [str(file), "--runs", str(tmp_path / "runs"), "--json", str(tmp_path / "table.json")]
    assert sweep.main(words) == 0
    circuit, ptp = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert (circuit["circuit"], circuit["components"], ptp["variant"], ptp["lora_rank"]) == ("ff", 1, "o-ptp", 2)
    assert "bits_per_byte" in circuit and "bits_per_byte" not in ptp
    record = json.loads((tmp_path / "runs" / "ptp" / "provenance.json").read_text())
    assert ptp["tokens_per_step"]["t1"] == record["figures"]["t1"]["tokens_per_step"]
    learnt = load_head(tmp_path / "runs" / "circuit")[1].parameters()
    assert circuit["parameters"] == sum(parameter.numel() for parameter in learnt) and ptp["parameters"] > 0
    line = f"| ptp | o-ptp | 2 | {ptp['parameters'] / 1e6:.2f}M | {ptp['tokens_per_step']['t1']:.3f}"
    assert line in capsys.readouterr().out
    trained = []
    monkeypatch.setattr("vllm_mtpc.train.run.train", trained.append)
    assert sweep.main(words) == 0 and not trained
    assert sweep.main([*words, "--set", "evaluation_sequences=0"]) == 1
    assert "run circuit: evaluation_sequences 0 leaves nothing to tabulate" in capsys.readouterr().err


def test_runs_are_trained_once_and_told(tmp_path, capsys, monkeypatch):
    file = plan(tmp_path, FILE)
    words = [str(file), "--runs", str(tmp_path / "runs"), "--json", str(tmp_path / "table.json")]
    assert sweep.main(words) == 0
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [(row["name"], row["circuit"], row["components"]) for row in rows] == [("one", "cp", 2), ("two", "hmm", 3)]
    for row in rows:
        record = json.loads((tmp_path / "runs" / row["name"] / "provenance.json").read_text())
        assert row["tokens_per_step"]["t0"] == record["figures"]["t0"]["tokens_per_step"]
        assert f"{row['tokens_per_step']['t1']:.3f}" in printed
    monkeypatch.setattr("vllm_mtpc.train.run.train", lambda options: pytest.fail("trained twice"))
    assert sweep.main(words) == 0
    file.write_text("title: x\ncommon: {}\n")
    assert sweep.main(words) == 1
    assert "expected are common, runs, title" in capsys.readouterr().err
    assert sweep.main([str(tmp_path / "none.yaml"), *words[1:]]) == 1
    assert "none.yaml: cannot be read as YAML" in capsys.readouterr().err
    file.write_text("title: x\ncommon: {}\nruns: [a]\n")
    assert sweep.main(words) == 1
    assert "runs is ['a']; expected are keys with values" in capsys.readouterr().err
    file.write_text("title: x\ncommon: {}\nruns: {}\n")
    assert sweep.main([*words, "--set", "foo"]) == 1
    assert "--set foo: KEY=VALUE is wanted" in capsys.readouterr().err


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    file = plan(tmp_path, PTP)
    words = [str(file), "--runs", str(tmp_path / "runs"), "--set", "save_minutes=0", "max_steps=3"]
    save, steps = Trainer.save_state, []

    def interrupted(trainer):
        save(trainer)
        steps.append(trainer.step)
        if len(steps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "save_state", interrupted)
    assert sweep.main(words) == 130
    assert sweep.main(words) == 0
    assert steps == [1, 2, 3, 1, 2, 3]  # the first run goes on after its step 2
