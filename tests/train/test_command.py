"""`vllm-mtpc train` on one process and on two: its files and its errors."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaModel

from benchmarks.demo.byte_target import build_tokenizer
from tests.support.training import flags, losses
from vllm_mtpc import progress
from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.cli import main
from vllm_mtpc.hf import load_target
from vllm_mtpc.train import command, run
from vllm_mtpc.train.options import parse

FEW = {"out": "none", "window": 4, "seq_len": 64, "windows_per_step": 16}


def test_run_writes_all_files(place, capsys):
    assert main(["train", *flags(place, "head")]) == 0
    out = place / "head"
    config, _ = load_head(out)
    assert (config.circuit, config.window, config.num_components) == ("btree", 4, 2)
    assert config.speculators_config.verifier.name_or_path == "../target"
    record = json.loads((out / "provenance.json").read_text())
    assert record["settings"]["num_components"] == 2
    printed = capsys.readouterr().out
    for name in ("t1", "t0"):
        figure = record["figures"][name]["tokens_per_step"]
        assert 1 <= figure <= 4
        assert f"tokens/step at T={name[1]}: {figure:.3f}" in printed
    assert len(losses(out)) == 4
    assert {path.name for path in out.iterdir()} == {
        "config.json", "model.safetensors", "README.md", "provenance.json", "metrics.jsonl", "state",
        "loss.png", "loss.svg", "acceptance.png", "acceptance.svg",
    }  # fmt: skip
    assert f"vllm serve {out}" in printed
    assert f"vllm-mtpc doctor {out}" in printed
    assert main(["inspect", str(out)]) == 0


def test_full_disk_keeps_the_earlier_head(place, capsys, monkeypatch):
    assert main(["train", *flags(place, "full")]) == 0
    before = {path.name: path.read_bytes() for path in (place / "full").iterdir() if path.suffix != ".jsonl"
              and path.is_file()}  # fmt: skip
    write, space = Path.write_bytes, ["model.safetensors.partial"]

    def full(path, data):
        if path.name not in space:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    shutil.rmtree(place / "full" / "state")
    assert main(["train", *flags(place, "full", seed=1)]) == 1
    error = capsys.readouterr().err
    assert "no space left; a head or trainer's state written before is intact" in error
    assert error.rstrip().endswith("type the same command with --resume")
    assert {name: (place / "full" / name).read_bytes() for name in before} == before
    monkeypatch.undo()
    assert main(["train", *flags(place, "full", seed=1, resume=True)]) == 0  # nothing is trained again
    assert (place / "full" / "model.safetensors").read_bytes() != before["model.safetensors"]


def test_a_place_that_may_not_be_written_is_one_line(place, capsys, monkeypatch):
    def denied(path, data):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_bytes", denied)
    assert main(["train", *flags(place, "denied", dry_run=True)]) == 1
    said = capsys.readouterr().err.splitlines()[-1]  # after a progress bar
    assert said.startswith("vllm-mtpc: error: ") and "Permission denied; change its permissions" in said


def test_fine_tuning_starts_where_the_head_was(place):
    assert main(["train", *flags(place, "first", circuit="cp", max_steps=30, beta=0, acceptance=0)]) == 0
    more = flags(place, "second", circuit="btree", init_from=place / "first", max_steps=1, learning_rate=1e-6,
                 beta=0, acceptance=0)  # fmt: skip
    assert main(["train", *more]) == 0
    assert losses(place / "second")[0] < losses(place / "first")[0] - 0.3


def test_dry_run_writes_a_servable_head(place, capsys):
    assert main(["train", *flags(place, "dry", dry_run=True)]) == 0
    config, head = load_head(place / "dry")
    assert head(torch.zeros(1, config.hidden_size)).leaf.isfinite().all()
    assert "This head is untrained" in (place / "dry" / "README.md").read_text()
    assert not (place / "dry" / "state").exists()
    assert "untrained head written" in capsys.readouterr().out


def test_a_dry_run_does_not_replace_what_was_learnt(place, capsys):
    assert main(["train", *flags(place, "learnt", evaluation_sequences=0)]) == 0
    before = {path.name: path.read_bytes() for path in (place / "learnt").iterdir() if path.is_file()}
    assert main(["train", *flags(place, "learnt", dry_run=True)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "holds a head of 4 steps, which --dry-run would replace with an untrained one; type another --out" in error
    (place / "learnt" / "provenance.json").unlink()  # a head of which nothing is known
    assert main(["train", *flags(place, "learnt", dry_run=True)]) == 1
    assert "holds a head, which --dry-run" in capsys.readouterr().err
    for name, data in before.items():
        assert name == "provenance.json" or (place / "learnt" / name).read_bytes() == data


def test_a_run_does_not_replace_another_run_s_state(place, capsys, monkeypatch):
    out = place / "started"
    assert main(["train", *flags(place, "started", evaluation_sequences=0)]) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    monkeypatch.setattr(command, "with_responses", lambda options: pytest.fail("responses were written first"))
    for changes in ({}, {"seed": 1}, {"regenerate": 4}):
        assert main(["train", *flags(place, "started", **changes)]) == 1
        error = capsys.readouterr().err.splitlines()[-1]
        assert "holds the state of another run (state); type --resume to go on with it, or another" in error
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_a_finished_run_is_resumed_without_its_metrics(place, capsys):
    assert main(["train", *flags(place, "finished", evaluation_sequences=0)]) == 0
    weights = (place / "finished" / "model.safetensors").read_bytes()
    for name in ("metrics.jsonl", "model.safetensors"):
        (place / "finished" / name).unlink()
    assert main(["train", *flags(place, "finished", evaluation_sequences=0, resume=True)]) == 0
    assert (place / "finished" / "model.safetensors").read_bytes() == weights
    record = json.loads((place / "finished" / "provenance.json").read_text())["run"]
    assert record["steps"] == 4 and record["peak_memory_bytes"] > 0


def spread(place: Path, out: str, *more: str, **changes: object) -> Path:
    """The same command under torchrun, in two processes."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "vllm_mtpc"]
    execute([*start, "train", *flags(place, out, **changes), *more])
    return place / out


def execute(words: list[str]) -> None:
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "parallel, head",
    [
        ("ddp", "linear"),
        pytest.param("fsdp", "linear", marks=pytest.mark.slow),
        pytest.param("ddp", "backbone", marks=pytest.mark.slow),
        pytest.param("fsdp", "backbone", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(place, parallel, head):
    case, own = ["--dtype", "float32", "--head", head], {}
    if head == "backbone":
        own = {"component_rank": 2, "backbone_width": 16, "learning_rate": 1e-3}
    one = place / f"one-{head}"
    if not one.exists():
        assert main(["train", *flags(place, one.name, **own), *case]) == 0
    two = spread(place, f"two-{parallel}-{head}", "--parallel", parallel, *case, **own)
    # The same windows and denominators; sums of float32 in another order, four steps of Adam on them.
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    mine, theirs = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(theirs[name], mine[name], atol=2e-4, rtol=0)
    # It must be able to fail: a step changes more than the tolerance.
    start, learnt = f"start-{head}", "leaf_weight" if head == "linear" else "backbone.fc.weight"
    assert main(["train", *flags(place, start, dry_run=True, dtype="float32", head=head, **own)]) == 0
    began = load_file(place / start / "model.safetensors")[learnt]
    assert (mine[learnt] - began).abs().max() > (1e-2 if head == "linear" else 2e-3)


@pytest.mark.slow
def test_ray_trains_as_one_process(place):
    """Two Ray workers; slow because a Ray cluster has to start."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    assert main(["train", *flags(place, "alone", dtype="float32")]) == 0
    execute([sys.executable, "-m", "vllm_mtpc", "train", *flags(place, "ray", dtype="float32", ray_workers=2)])
    assert losses(place / "ray") == pytest.approx(losses(place / "alone"), abs=1e-5)


def test_draft_layers_are_written_with_their_head(place, capsys):
    assert main(["train", *flags(place, "layers", lora_layers=1)]) == 0
    assert load_head(place / "layers")[0].lora_layers == 1
    figures = json.loads((place / "layers" / "provenance.json").read_text())["figures"]
    adapters = load_file(place / "layers" / "adapter_model.safetensors")
    assert any(bool(value.any()) for name, value in adapters.items() if "lora_B" in name)  # they start at zero
    capsys.readouterr()
    words = [str(place / "layers"), "--data", str(place / "text.jsonl"), "--prompt-tokens", "8", "--new-tokens", "12"]
    assert main(["eval", *words, "--sequences", "4", "--device", "cpu"]) == 0
    assert "tokens/step, expected" in capsys.readouterr().out
    assert figures["t1"]["tokens_per_step"] >= 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "{place}/none.jsonl"}, "none.jsonl: no such file or folder; name one that exists"),
        ({"data": "{place}/none*.jsonl"}, "none*.jsonl: no file matches"),
        ({"validation_data": "{place}/none.txt"}, "none.txt: no such file"),
        ({"out": "{place}/text.jsonl/head"}, "text.jsonl is no folder that you may write to; name another folder"),
        ({"out": "{place}/shut/head"}, "shut is no folder that you may write to"),
        ({"cache": "{place}/shut/cache"}, "shut is no folder that you may write to"),
    ],
)
def test_paths_are_checked_before_weights_are_loaded(place, capsys, monkeypatch, changes, message):
    """Nothing of the target is loaded, and no responses are written, for a place that is not there."""
    monkeypatch.setattr(run, "load_target", lambda *given: pytest.fail("weights were loaded"))
    monkeypatch.setattr(command, "with_responses", lambda options: pytest.fail("responses were written"))
    (place / "shut").mkdir(exist_ok=True)
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("shut") and may(path, mode))
    given = {"out": "refused"} | {key: value.format(place=place) for key, value in changes.items()}
    for more in ({}, {"regenerate": 4}):
        assert main(["train", *flags(place, **given, **more)]) == 1
        assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (place / "refused").exists() and not list((place / "shut").iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expander_rank": 8}, "expander_rank=8 is not an option of head 'linear'"),
        ({"num_speculative_tokens": 4}, "at most 3 can be drafted"),
        ({"init_from": "{place}/small"}, "cannot start from a head of"),
        (
            {"head": "backbone", "component_rank": 2, "init_from": "{place}/small"},
            "a BackboneHead cannot start from a LinearHead",
        ),
        ({"head": "ptp", "init_from": "{place}/small"}, "a head of method mtpc; a PTP head starts from a PTP head"),
        ({"head": "ptp", "baseline": "{place}/small"}, "not a trained and measured head of variant independent"),
        ({"data": "{place}/keys.jsonl"}, "keys.jsonl:1: keys prompt; a record must be one of"),
        ({"data": "{place}/chat.jsonl"}, "chat.jsonl:1: the target's tokenizer has no chat template"),
        ({"evaluation_tokens": 5000}, "lower --evaluation-tokens"),
        ({"device": "tpu"}, "allowed are auto, cpu, cuda and cuda:N"),
        ({"ray_workers": 2}, "pip install '.[ray]'"),
        ({"seq_len": 1024}, "reads at most 512 tokens; set seq_len to that or less, or leave it out"),
        ({"target": "no/such-model"}, "causal language model"),
        ({"init_from": "nowhere"}, "no head at nowhere"),
    ],
)
def test_options_are_checked_before_weights_are_loaded(place, capsys, monkeypatch, changes, message):
    (place / "keys.jsonl").write_text('{"prompt": "a"}\n')
    (place / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    if not (place / "small").exists():
        assert main(["train", *flags(place, "small", window=3, dry_run=True)]) == 0
    monkeypatch.setattr(run, "load_target", lambda *given: pytest.fail("weights were loaded"))
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    words = flags(place, "refused", **{key: str(value).format(place=place) for key, value in changes.items()})
    if changes.get("head") == "ptp":  # which has no circuit
        words = [word for at, word in enumerate(words) if not {word, words[at - 1]} & {"--circuit", "--components"}]
    assert main(["train", *words]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("vllm-mtpc: error: ") and message in error
    assert not (place / "refused").exists()


def test_interrupted_evaluation_keeps_the_head(place, capsys, monkeypatch):
    def interrupted(job, samples):
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_mtpc.train.circuit_trainer.CircuitTrainer.measure", interrupted)
    assert main(["train", *flags(place, "unmeasured")]) == 130
    out = place / "unmeasured"
    assert f"SIGINT: not measured; the head is in {out}; to measure it, type: vllm-mtpc eval" in capsys.readouterr().err
    assert main(["inspect", str(out)]) == 0


def test_run_of_minutes_writes_a_head(place):
    words = flags(place, "timed", minutes=0.05, evaluation_sequences=0)
    at = words.index("--max-steps")
    assert main(["train", *words[:at], *words[at + 2 :]]) == 0
    record = json.loads((place / "timed" / "provenance.json").read_text())
    assert record["run"]["steps"] > 4 and record["settings"]["minutes"] == 0.05
    assert main(["inspect", str(place / "timed")]) == 0


def test_default_rate_depends_on_hidden_size(place):
    words = flags(place, "wide", dry_run=True)
    at = words.index("--learning-rate")
    assert main(["train", *words[:at], *words[at + 2 :]]) == 0
    record = json.loads((place / "wide" / "provenance.json").read_text())
    assert record["settings"]["learning_rate"] == pytest.approx(1.2 / 32, rel=0.02)  # two digits are kept


def test_default_row_fits_the_target(place):
    words = flags(place, "rows", evaluation_sequences=0, max_steps=1)
    at = words.index("--seq-len")
    assert main(["train", *words[:at], *words[at + 2 :]]) == 0
    assert json.loads((place / "rows" / "provenance.json").read_text())["settings"]["seq_len"] == 512


def test_short_run_reads_part_of_the_data(place, capsys, monkeypatch):
    """Two steps of 16 windows, 16 bytes each, are 512 of the text's 2,000 bytes; many steps read all of it."""
    monkeypatch.setattr(run, "MIN_BYTES", 0)
    named = {"target": str(place / "target"), "data": [str(place / "text.jsonl")]}
    target, read = load_target(named["target"]), {}
    for steps in (2, 10000):
        read[steps] = run.read_data(parse(FEW | named | {"max_steps": steps}), target)[1].documents
    assert 2 < read[2] < read[10000] / 2 and read[10000] > 20
    assert main(["train", *flags(place, "short", max_steps=2, windows_per_step=16, evaluation_sequences=0)]) == 0
    assert "MB are read, which 2 steps need" in capsys.readouterr().out


def test_progress_is_logged_as_lines(place, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    assert main(["train", *flags(place, "logged", evaluation_sequences=0)]) == 0
    said = capsys.readouterr().err.partition("tokenising")[2]  # what stands before is of transformers
    assert said and "\r" not in said
    for step in range(1, 5):
        assert any(line.startswith(f"btree: {step}/4 step, ") and "loss=" in line for line in said.splitlines())


def test_target_without_lm_head_is_refused(place, capsys):
    """A backbone alone: transformers would make up an lm_head."""
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    LlamaModel(LlamaConfig(**sizes)).save_pretrained(place / "backbone")
    build_tokenizer().save_pretrained(place / "backbone")
    assert main(["train", *flags(place, "refused", target=place / "backbone")]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "have no lm_head.weight (1 tensors of LlamaForCausalLM are missing)" in error


def test_folder_of_another_model_is_not_overwritten(place, capsys):
    assert main(["train", *flags(place, "target")]) == 1
    assert "holds another model's config.json" in capsys.readouterr().err
