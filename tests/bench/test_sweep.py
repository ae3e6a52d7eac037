"""The sweep trains what its file says, once, and tells what the runs wrote."""

from __future__ import annotations

import json

import pytest

from tests.e2e.models import make_target
from vllm_mtpc.bench import sweep

FILE = """
title: Two circuits
common: {{target: {target}, data: [{data}], window: 3, max_steps: 3, windows_per_step: 32, seq_len: 32, device: cpu,
         evaluation_sequences: 4, evaluation_prompt_tokens: 4, evaluation_tokens: 10, components: 2}}
runs:
  one: {{circuit: cp}}
  two: {{circuit: hmm, components: 3}}
"""


def test_runs_are_trained_once_and_told(tmp_path, capsys, monkeypatch):
    make_target(tmp_path / "target", 16, seed=1, hidden_size=32)
    lines = [{"prompt_ids": [1, 2], "response_ids": [(3 * i + k) % 16 for k in range(20)]} for i in range(8)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = tmp_path / "plan.yaml"
    file.write_text(FILE.format(target=tmp_path / "target", data=tmp_path / "d.jsonl"))
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
