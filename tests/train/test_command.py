"""`vllm-mtpc train` on one process and on two: its files, and what interruptions leave."""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from tests.support.training import flags, losses, record_of, refused, train
from vllm_mtpc import report
from vllm_mtpc.checkpoint import check_tensors, load_head, read_config
from vllm_mtpc.cli import main
from vllm_mtpc.train import command


def test_run_writes_all_files_and_logs_lines(place, capsys, monkeypatch):
    monkeypatch.setattr(report, "LINE_SECONDS", 0)
    out = train(place, "head", draws=True)
    config, _ = load_head(out)
    assert (config.circuit.kind, config.window, config.num_components) == ("btree", 4, 2)
    assert config.speculators_config.verifier.name_or_path == "../target"
    record, (printed, logged) = record_of(out), capsys.readouterr()
    assert record["settings"]["num_components"] == 2
    for name in ("t1", "t0"):
        figure = record["figures"][name]["tokens_per_step"]
        assert 1 <= figure <= 4 and f"tokens/step at T={name[1]}: {figure:.3f}" in printed
    assert len(losses(out)) == 4
    assert {path.name for path in out.iterdir()} == {
        "config.json", "model.safetensors", "README.md", "provenance.json", "metrics.jsonl", "state",
        "loss.png", "loss.svg", "acceptance.png", "acceptance.svg",
    }  # fmt: skip
    assert f"vllm serve {out}" in printed
    assert f"vllm-mtpc doctor {out}" in printed
    logged = logged.partition("tokenising")[2]  # what comes before is of transformers
    assert logged and "\r" not in logged
    for step in range(1, 5):
        assert any(line.startswith(f"btree: {step}/4 step, ") and "loss=" in line for line in logged.splitlines())
    check_tensors(out, read_config(out))


def test_fine_tuning_starts_where_the_head_was(place):
    likelihood = {"beta": 0, "acceptance": 0}
    first = train(place, "first", circuit="cp", max_steps=30, **likelihood)
    second = train(place, "second", init_from=first, max_steps=1, learning_rate=1e-6, **likelihood)
    assert losses(second)[0] < losses(first)[0] - 0.3


def test_finished_run_is_kept_and_resumed(place, capsys, monkeypatch):
    out = train(place, "finished", evaluation_sequences=0)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    monkeypatch.setattr(command, "with_responses", lambda options: pytest.fail("responses were written first"))
    for changes in ({}, {"seed": 1}, {"regenerate": 4}):
        error = refused(capsys, place, "finished", **changes)
        assert "holds the state of another run (state); type --resume to go on with it, or another" in error
    assert "This head is untrained" in (train(place, "dry", dry_run=True) / "README.md").read_text()
    check_tensors(place / "dry", read_config(place / "dry"))
    error = refused(capsys, place, "finished", dry_run=True)
    assert "holds a head, which --dry-run would replace with an untrained one; type another --out" in error
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    for name in ("metrics.jsonl", "model.safetensors"):
        (out / name).unlink()
    train(place, "finished", evaluation_sequences=0, resume=True)
    assert (out / "model.safetensors").read_bytes() == before[out / "model.safetensors"]
    run_record = record_of(out)["run"]
    assert run_record["steps"] == 4 and run_record["peak_memory_bytes"] > 0


def test_two_processes_train_as_one(place):
    one, two = train(place, "one", dtype="float32"), place / "two"
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vllm_mtpc"]
    words, environment = [*start, "train", *flags(place, "two", dtype="float32")], dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    # The same windows and denominators; sums of float32 in another order, four steps of Adam on them.
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    mine, theirs = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(theirs[name], mine[name], atol=2e-4, rtol=0)
    # It must be able to fail: a step changes more than the tolerance.
    began = load_file(train(place, "start", dry_run=True, dtype="float32") / "model.safetensors")["leaves.leaf_weight"]
    assert (mine["leaves.leaf_weight"] - began).abs().max() > 1e-2


def test_interrupted_evaluation_keeps_the_head(place, capsys, monkeypatch):
    def interrupted(job, samples):
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_mtpc.train.circuit_trainer.CircuitTrainer.measure", interrupted)
    assert main(["train", *flags(place, "unmeasured")]) == 130
    out = place / "unmeasured"
    assert f"head written: {out}" in capsys.readouterr().out
    check_tensors(out, read_config(out))


def test_ray_example_continues_a_run_of_one_process(place, monkeypatch):
    """With one worker, in this process."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    main_of_example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "ray_train.py"))["main"]
    out, asked = train(place, "parts", max_steps=1, evaluation_sequences=0), []

    def trainer(worker, train_loop_config, **config):
        asked.append(config["scaling_config"].num_workers)
        return SimpleNamespace(fit=lambda: worker(train_loop_config))

    monkeypatch.setitem(main_of_example.__globals__, "TorchTrainer", trainer)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = command.read_options(parser.parse_args(flags(place, "parts", evaluation_sequences=0, resume=True)))
    (place / "run.yaml").write_text(options.model_dump_json())
    main_of_example("2", str(place / "run.yaml"))
    assert asked == [2] and len(losses(out)) == 4
