"""`vllm-mtpc train` on one process and on two: its files and its errors."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaModel

from benchmarks.demo import corpus
from benchmarks.demo.byte_target import build_tokenizer
from tests.support.training import flags, losses, record_of, refused, train
from vllm_mtpc import demo, progress
from vllm_mtpc.checkpoint import check_tensors, load_head, read_config
from vllm_mtpc.cli import main
from vllm_mtpc.hf import load_target
from vllm_mtpc.train import command, run
from vllm_mtpc.train.circuit_trainer import CircuitTrainer
from vllm_mtpc.train.options import parse

DRAFT_LAYERS = {"head": "backbone", "component_rank": 2}
FEW = {"out": "none", "window": 4, "seq_len": 64, "windows_per_step": 16}


def test_run_writes_all_files_and_logs_lines(place, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    out = train(place, "head")
    config, _ = load_head(out)
    assert (config.circuit, config.window, config.num_components) == ("btree", 4, 2)
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


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_full_disk_keeps_the_earlier_head(place, capsys, monkeypatch):
    out = train(place, "full")
    shutil.rmtree(out / "state")
    before = {path: data for path, data in files_of(out).items() if path.suffix != ".jsonl"}
    write, space = Path.write_bytes, ["model.safetensors.partial"]

    def full(path, data):
        if path.name not in space:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    error = refused(capsys, place, "full", seed=1)
    assert error.endswith("No space left on device; free space and type the same again")
    assert files_of(out).items() >= before.items()
    monkeypatch.undo()
    train(place, "full", seed=1, resume=True)  # nothing is trained again
    assert files_of(out)[out / "model.safetensors"] != before[out / "model.safetensors"]


def test_fine_tuning_starts_where_the_head_was(place):
    likelihood = {"beta": 0, "acceptance": 0}
    first = train(place, "first", circuit="cp", max_steps=30, **likelihood)
    second = train(place, "second", init_from=first, max_steps=1, learning_rate=1e-6, **likelihood)
    assert losses(second)[0] < losses(first)[0] - 0.3


def test_dry_run_writes_a_servable_head(place, capsys):
    out = train(place, "dry", dry_run=True)
    config, head = load_head(out)
    assert head(torch.zeros(1, config.hidden_size)).leaf.isfinite().all()
    assert "This head is untrained" in (out / "README.md").read_text()
    assert not (out / "state").exists()
    assert "untrained head written" in capsys.readouterr().out


def test_finished_run_is_kept_and_resumed(place, capsys, monkeypatch):
    out = train(place, "finished", evaluation_sequences=0)
    before = files_of(out)
    monkeypatch.setattr(command, "with_responses", lambda options: pytest.fail("responses were written first"))
    for changes in ({}, {"seed": 1}, {"regenerate": 4}):
        error = refused(capsys, place, "finished", **changes)
        assert "holds the state of another run (state); type --resume to go on with it, or another" in error
    error = refused(capsys, place, "finished", dry_run=True)
    assert "holds a head, which --dry-run would replace with an untrained one; type another --out" in error
    assert files_of(out) == before
    for name in ("metrics.jsonl", "model.safetensors"):
        (out / name).unlink()
    train(place, "finished", evaluation_sequences=0, resume=True)
    assert (out / "model.safetensors").read_bytes() == before[out / "model.safetensors"]
    run_record = record_of(out)["run"]
    assert run_record["steps"] == 4 and run_record["peak_memory_bytes"] > 0


def spread(place: Path, out: str, parallel: str, **changes: object) -> Path:
    """The same command in two processes, of torchrun or of Ray."""
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    if parallel == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
        start = []
    changes |= {"ray_workers": 2} if parallel == "ray" else {"parallel": parallel}
    words = [sys.executable, *start, "-m", "vllm_mtpc", "train", *flags(place, out, **changes)]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return place / out


@pytest.mark.parametrize(
    "parallel, head",
    [
        ("ddp", "linear"),
        pytest.param("ray", "linear", marks=pytest.mark.slow),
        pytest.param("fsdp", "linear", marks=pytest.mark.slow),
        pytest.param("ddp", "backbone", marks=pytest.mark.slow),
        pytest.param("fsdp", "backbone", marks=pytest.mark.slow),
    ],
)
def test_two_processes_train_as_one(place, parallel, head):
    own = {"dtype": "float32", "head": head}
    if head == "backbone":
        own |= {"component_rank": 2, "backbone_width": 16, "learning_rate": 1e-3}
    one = place / f"one-{head}"
    if not one.exists():
        train(place, one.name, **own)
    two = spread(place, f"two-{parallel}-{head}", parallel, **own)
    # The same windows and denominators; sums of float32 in another order, four steps of Adam on them.
    assert losses(two) == pytest.approx(losses(one), abs=1e-5)
    mine, theirs = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert mine.keys() == theirs.keys()
    for name in mine:
        torch.testing.assert_close(theirs[name], mine[name], atol=2e-4, rtol=0)
    # It must be able to fail: a step changes more than the tolerance.
    learnt = "leaf_weight" if head == "linear" else "backbone.fc.weight"
    began = load_file(train(place, f"start-{parallel}-{head}", dry_run=True, **own) / "model.safetensors")[learnt]
    assert (mine[learnt] - began).abs().max() > (1e-2 if head == "linear" else 2e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "{place}/none.jsonl"}, "none.jsonl: no such file or folder with content; name files"),
        ({"data": "{place}/none.jsonl", "regenerate": 4}, "none.jsonl: no such file or folder"),
        ({"data": "{place}/none*.jsonl"}, "none*.jsonl: no such file or folder"),
        ({"validation_data": "{place}/none.txt", "regenerate": 4}, "none.txt: no such file"),
        ({"out": "{place}/text.jsonl/head"}, "text.jsonl/head: cannot be written to (Not a directory)"),
        ({"out": "{place}/shut", "regenerate": 4}, "shut: cannot be written to (Permission denied)"),
        ({"cache": "{place}/shut"}, "shut: cannot be written to (Permission denied)"),
        ({"expander_rank": 8}, "expander_rank=8 is not an option of head 'linear'"),
        ({"num_speculative_tokens": 4}, "at most 3 can be drafted"),
        ({"init_from": "{place}/small"}, "cannot start from a head of"),
        ({**DRAFT_LAYERS, "init_from": "{place}/small"}, "cannot start from a LinearHead"),
        ({"head": "ptp", "init_from": "{place}/small"}, "a head of method mtpc; a PTP head starts from a PTP head"),
        ({"head": "ptp", "u_embedding": "bits"}, "unknown u_embedding 'bits'"),
        ({"head": "ptp", "u_features": 8}, "u_features=8 is not an option of u_embedding 'ieee'"),
        ({"head": "ptp", "baseline": "{place}/small"}, "not a trained and measured head of variant independent"),
        ({"data": "{place}/keys.jsonl"}, "keys.jsonl:1: keys prompt; a record must be one of"),
        ({"data": "{place}/chat.jsonl"}, "chat.jsonl:1: the target has no chat template"),
        ({"evaluation_tokens": 5000}, "lower --evaluation-tokens"),
        ({"device": "tpu"}, "allowed are auto, cpu, cuda and cuda:N"),
        ({"ray_workers": 2}, "pip install '.[ray]'"),
        ({"seq_len": 1024}, "reads at most 512 tokens; set seq_len to that or less, or leave it out"),
        ({"target": "no/such-model"}, "causal language model"),
        ({"init_from": "nowhere"}, "no head at nowhere"),
        ({"out": "{place}/target"}, "holds another model's config.json"),
        ({"head": "backbone", "component_rank": 0}, "components=2 needs component_rank"),
        ({**DRAFT_LAYERS, "aux_hidden_state_layer_ids": 3}, "rising numbers from 0 to 2"),
        ({**DRAFT_LAYERS, "lora_layers": 1}, "lora_layers=1 with head 'backbone'"),
    ],
)
def test_options_are_checked_before_weights_are_loaded(place, capsys, monkeypatch, changes, message):
    (place / "shut").mkdir(exist_ok=True)
    opened = tempfile.TemporaryFile

    def refusing(dir: Path) -> IO[bytes]:
        if dir.name == "shut":
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refusing)
    (place / "keys.jsonl").write_text('{"prompt": "a"}\n')
    (place / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    if not (place / "small").exists():
        train(place, "small", window=3, dry_run=True)
    monkeypatch.setattr(run, "load_target", lambda *given: pytest.fail("weights were loaded"))
    monkeypatch.setattr(command, "with_responses", lambda options: pytest.fail("responses were written"))
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    given = {"out": "refused"} | {key: str(value).format(place=place) for key, value in changes.items()}
    error = refused(capsys, place, **given)
    assert error.startswith("vllm-mtpc: error: ") and message in error
    assert not [*(place / "refused").glob("*"), *(place / "shut").iterdir()]


def test_interrupted_evaluation_keeps_the_head(place, capsys, monkeypatch):
    def interrupted(job, samples):
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_mtpc.train.circuit_trainer.CircuitTrainer.measure", interrupted)
    assert main(["train", *flags(place, "unmeasured")]) == 130
    out = place / "unmeasured"
    assert f"head written: {out}" in capsys.readouterr().out
    check_tensors(out, read_config(out))


def test_short_run_reads_part_of_the_data_at_default_rate(place, capsys, monkeypatch):
    """Two steps of 16 windows, 16 bytes each, are 512 of the text's 2,000 bytes; many steps read all of it."""
    monkeypatch.setattr(run, "MIN_BYTES", 0)
    named = {"target": str(place / "target"), "data": [str(place / "text.jsonl")]}
    target, read = load_target(named["target"]), {}
    for steps in (2, 10000):
        read[steps] = run.read_data(parse(FEW | named | {"max_steps": steps}), target)[1].documents
    assert 2 < read[2] < read[10000] / 2 and read[10000] > 20
    few = {"max_steps": 2, "windows_per_step": 16, "evaluation_sequences": 0}
    settings = record_of(train(place, "short", **few, learning_rate=None, seq_len=None))["settings"]
    assert "MB are read, which 2 steps need" in capsys.readouterr().out
    assert settings["learning_rate"] == pytest.approx(1.2 / 32, rel=0.02)  # two digits are kept
    assert settings["seq_len"] == 512


@pytest.mark.parametrize("head, circuit, rank", [("shared", "cp", 16), ("shared", "ff", None), ("linear", "cp", None)])
def test_components_of_large_vocabularies_have_low_rank(head, circuit, rank, tmp_path):
    """Of a new head; one that continues another has its components."""
    given = {"target": "x", "data": ["x"], "out": "x", "head": head, "circuit": circuit}
    sizes = {"vocab_size": 2001, "hidden_size": 8}
    made = CircuitTrainer.head_config(parse(given), LlamaConfig(), "x", sizes)
    assert made.component_rank == rank
    (tmp_path / "config.json").write_text(made.model_copy(update={"component_rank": None}).to_json())
    options = parse({**given, "init_from": str(tmp_path)})
    assert CircuitTrainer.head_config(options, LlamaConfig(), "x", sizes).component_rank is None


def test_default_head_is_small_for_its_vocabulary(tmp_path):
    """Or that of the head it continues."""
    given = {"target": "x", "data": ["x"], "out": "x", "circuit": "cp"}

    def made(vocab_size, **more):
        sizes = {"vocab_size": vocab_size, "hidden_size": 8}
        return CircuitTrainer.head_config(parse({**given, **more}), LlamaConfig(), "x", sizes)

    assert [made(size).head for size in (320, 2000, 2001)] == ["linear", "linear", "shared"]
    (tmp_path / "config.json").write_text(made(2001, head="linear").to_json())
    assert made(2001, init_from=str(tmp_path)).head == "linear"


def test_target_without_lm_head_is_refused(place, capsys):
    """A backbone alone: transformers would make up an lm_head."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(place / "backbone")
    build_tokenizer().save_pretrained(place / "backbone")
    error = refused(capsys, place, "refused", target=place / "backbone")
    assert "have no lm_head.weight (1 tensors of LlamaForCausalLM are missing)" in error


@pytest.mark.slow
def test_btree_beats_cp_beats_ff(tmp_path):
    """Three trainings of 300 steps, minutes on a CPU; seeds are fixed, and the gaps are several standard errors."""
    corpus.write_jsonl(corpus.load(), tmp_path)
    found = {}
    for circuit, components in (("ff", 1), ("cp", 8), ("btree", 8)):
        words = ["--target", str(demo.path("target")), "--circuit", circuit, "--components", str(components)]
        words += ["--data", str(tmp_path / "valid.jsonl"), "--out", str(tmp_path / circuit)]
        words += ["--window", "8", "--max-steps", "300", "--windows-per-step", "384", "--learning-rate", "0.005"]
        words += ["--seq-len", "256", "--evaluation-sequences", "192", "--block-rows", "400", "--device", "cpu"]
        assert main(["train", *words]) == 0
        found[circuit] = record_of(tmp_path / circuit)["figures"]["t1"]
    figures = {circuit: values["tokens_per_step"] for circuit, values in found.items()}
    assert figures["btree"] > figures["cp"] + 2 * found["cp"]["standard_error"], figures
    assert figures["cp"] > figures["ff"] + 2 * found["ff"]["standard_error"], figures
