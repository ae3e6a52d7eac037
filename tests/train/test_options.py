"""Options of a training run: file and flags have the same keys; what is not allowed is refused in one line."""

from __future__ import annotations

import argparse
import errno
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
from transformers import LlamaConfig, LlamaModel

from benchmarks.demo.byte_target import build_tokenizer
from tests.support.training import record_of, refused, train
from vllm_mtpc.errors import MtpcError, UsageError
from vllm_mtpc.hf import load_target
from vllm_mtpc.train import command, run
from vllm_mtpc.train.circuit_trainer import CircuitTrainer
from vllm_mtpc.train.options import TrainOptions, parse
from vllm_mtpc.train.ptp.ptp_module import loss_name
from vllm_mtpc.train.ptp.ptp_trainer import PtpTrainer

REQUIRED = {"target": "t", "data": ["d"], "out": "o"}


def typed(*words: str) -> TrainOptions:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.read_options(parser.parse_args(words))


def test_flags_are_converted_and_take_precedence_over_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("target: t\ndata: [d]\nout: o\nwindow: 8\ncircuit: hmm\n")
    o = typed("--config", str(file), "--data", "a", "b", "--window", "4", "--gamma", "0.5", "--train-first", "--cache",
              "c", "--dry-run")  # fmt: skip
    assert (o.data, o.window, o.gamma, o.train_first, o.circuit) == (["a", "b"], 4, 0.5, True, "hmm")
    assert (o.cache, o.dry_run, o.out) == (Path("c"), True, Path("o"))


PTP = "head: ptp\n"
KINDS = "allowed are none, mlp, lora, backbone, drafter; set trunk to one of them"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("target: [", "cannot be read as YAML"),
        ("windows: 8", "unknown key 'windows'; allowed keys: .*window"),
        ("learning_rat: 8", "correct its name$"),
        ("head: medusa", "'head' = 'medusa': Input should be 'mtpc' or 'ptp'"),
        ("trunk: medusa", KINDS),
        ("leaves: {kind: own, component_rank: 4}", "'component_rank' is not an option of it; allowed: token_rank"),
        ("trunk: {width: 4, ranks: 2}", "'ranks' is not an option of it; allowed: .*width"),
        ("trunk: 4", "a kind or a section is expected, for example none"),
        ("draft_vocab_size: -1", "draft_vocab_size"),
        ("gamma: 2", "gamma"),
        ("circuit: ff\ncomponents: 4", "exactly 1; use 'cp'"),
        ("trunk: lora\ncache: c", "leave out cache"),
        ("lora_rank: 8", "lora_rank is an option of PTP heads: remove lora_rank, or set head ptp"),
        ("freeze_trunk: true", "freeze_trunk needs a trained trunk"),
        ("trunk: backbone\ntrain_first: true", "train_first with trunk backbone"),
        ("data: [a.txt, b/*.jsonl]\nsplit: test", "split='test' is an option of data sets"),
        ("trunk: {kind: drafter, method: dflash}", "methods mtp and eagle3 are trained on"),
        ("trunk: drafter\nstates: transformers", "with states auto or vllm"),
        ("variant: c-ptp", "variant is an option of PTP heads: remove variant, or set head ptp"),
        (f"{PTP}circuit: hmm", "circuit is an option of circuits: remove circuit, or set head mtpc"),
        (f"{PTP}ptp_loss: inverse", "ptp_loss 'inverse' with variant 'o-ptp': allowed are ce, bce; set"),
        (f"{PTP}proposals: student\nu_beta: 0.5", "its u is uniform; remove u_beta"),
    ],
)
def test_file_is_refused_in_one_line(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    if text:
        file.write_text(f"target: t\ndata: [d]\nout: o\n{text}\n")
    with pytest.raises(MtpcError, match=message) as caught:
        typed("--config", str(file))
    assert "\n" not in str(caught.value)


def test_missing_option_and_several_engines_are_refused(monkeypatch):
    with pytest.raises(UsageError, match="--data, --out missing; type: vllm-mtpc train"):
        typed("--target", "t")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="type vllm-mtpc regenerate first"):
        command.with_responses(parse(REQUIRED | {"regenerate": 4}))


BACKBONE = {"trunk": "backbone", "leaves": {"kind": "lm_head", "component_rank": 2}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "{place}/none.jsonl", "regenerate": 4}, "none.jsonl: no such file or folder with content; name"),
        ({"validation_data": "{place}/none.txt", "regenerate": 4}, "none.txt: no such file"),
        ({"data": "{place}/keys.jsonl"}, "keys.jsonl:1: keys prompt; a record must be one of"),
        ({"data": "{place}/chat.jsonl"}, "chat.jsonl:1: the target has no chat template"),
        ({"out": "{place}/text.jsonl/head"}, "text.jsonl/head: cannot be written to (Not a directory)"),
        ({"out": "{place}/shut", "regenerate": 4}, "shut: cannot be written to (Permission denied)"),
        ({"out": "{place}/target"}, "holds another model's config.json"),
        ({"cache": "{place}/shut"}, "shut: cannot be written to (Permission denied)"),
        ({"leaves.expander-rank": 8}, "unknown key 'expander_rank'"),
        ({"init_from": "nowhere"}, "no head at nowhere"),
        ({**BACKBONE, "init_from": "{place}/small"}, "window=4 cannot start from a head of window=3"),
        ({"head": "ptp", "init_from": "{place}/small"}, "a head of method mtpc; a PTP head starts from a PTP head"),
        ({"evaluation_tokens": 5000}, "lower --evaluation-tokens"),
        ({"device": "tpu"}, "allowed are auto, cpu, cuda and cuda:N"),
        ({"seq_len": 1024}, "reads at most 512 tokens; set seq_len to that or less, or leave it out"),
        ({"target": "no/such-model"}, "causal language model"),
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
    monkeypatch.setattr(run, "load_target", lambda *arguments: pytest.fail("weights were loaded"))
    monkeypatch.setattr(command, "with_responses", lambda options: pytest.fail("responses were written"))
    values = {"out": "refused"} | {
        key: value.format(place=place) if isinstance(value, str) else value for key, value in changes.items()
    }
    error = refused(capsys, place, **values)
    assert error.startswith("vllm-mtpc: error: ") and message in error
    assert not [*(place / "refused").glob("*"), *(place / "shut").iterdir()]


def test_target_without_lm_head_is_refused(place, capsys):
    """A backbone alone: transformers would make up an lm_head."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    LlamaModel(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(place / "backbone")
    build_tokenizer().save_pretrained(place / "backbone")
    error = refused(capsys, place, "refused", target=place / "backbone")
    assert "have no lm_head.weight (1 tensors of LlamaForCausalLM are missing)" in error


@pytest.mark.parametrize(
    "values",
    [
        {"trunk": {"kind": "lora", "layers": 1}, "leaves": "own", "draft_vocab_size": 0},
        {"head": "ptp", "lora_rank": 8, "lora_alpha": 4},
        {"data": ["a.txt", "name:config"], "split": "test"},
        {"data": ["."], "split": "test"},  # a folder may be of parquet files
        {"head": "ptp"},
    ],
)
def test_options_are_the_same_after_a_round_trip(values):
    """As they reach a worker of Ray: every one of them is set."""
    options = parse(REQUIRED | values)
    assert parse(options.model_dump(mode="json")) == options


def test_defaults_depend_on_head_and_circuit():
    ptp, circuit = parse(REQUIRED | {"head": "ptp"}), parse(REQUIRED)
    assert (ptp.windows_per_step, ptp.learning_rate, loss_name(ptp)) == (512, 1e-3, "ce")
    assert (circuit.windows_per_step, circuit.learning_rate) == (4096, None)  # None: by the width of the target
    assert (ptp.variant, circuit.circuit, circuit.components) == ("o-ptp", "btree", None)
    assert loss_name(parse(REQUIRED | {"head": "ptp", "variant": "c-ptp"})) == "kl"


def test_sizes_by_vocabulary():
    def made(vocab_size, circuit):
        sizes = {"vocab_size": vocab_size, "hidden_size": 8}
        return CircuitTrainer.head_config(parse(REQUIRED | {"circuit": circuit}), LlamaConfig(), "x", sizes)

    heads = [made(*sizes) for sizes in ((320, "cp"), (49152, "cp"), (320, "ff"))]
    assert [(head.num_components, head.window) for head in heads] == [(32, 16), (4, 8), (1, 16)]


def test_parts_are_those_of_init_from(tmp_path):
    """What is not given is the source's; a part of another kind has its own defaults."""

    def made(vocab_size, **more):
        sizes = {"vocab_size": vocab_size, "hidden_size": 8}
        return CircuitTrainer.head_config(parse({**REQUIRED, "circuit": "cp", **more}), LlamaConfig(), "x", sizes)

    source = made(320, trunk={"kind": "mlp", "width": 3}, leaves={"kind": "lm_head", "component_rank": 5})
    source = source.model_copy(update={"draft_vocab_size": 64})
    (tmp_path / "config.json").write_text(source.to_json())
    continued = made(320, init_from=str(tmp_path), leaves={"token_rank": 2})
    assert (continued.trunk, continued.draft_vocab_size) == (source.trunk, 64)
    assert continued.leaves == source.leaves.model_copy(update={"token_rank": 2})
    assert made(320, init_from=str(tmp_path), leaves="own").leaves.kind == "own"


def test_short_run_reads_part_of_the_data_at_default_rate(place, capsys, monkeypatch):
    """Two steps of 16 windows, 16 bytes each, are 512 of the text's 2,000 bytes; many steps read all of it."""
    monkeypatch.setattr(run, "MIN_BYTES", 0)
    named = {"target": str(place / "target"), "data": [str(place / "text.jsonl")], "out": "none", "window": 4}
    target, read = load_target(named["target"]), {}
    for steps in (2, 10000):
        options = parse(named | {"seq_len": 64, "windows_per_step": 16, "max_steps": steps})
        read[steps] = run.read_data(options, target)[1].documents
    assert 2 < read[2] < read[10000] / 2 and read[10000] > 20
    few = {"max_steps": 2, "windows_per_step": 16, "evaluation_sequences": 0}
    settings = record_of(train(place, "short", **few, learning_rate=None, seq_len=None))["settings"]
    assert "MB are read, which 2 steps need" in capsys.readouterr().out
    assert settings["learning_rate"] == pytest.approx(1.2 / 32, rel=0.02)  # two digits are kept
    assert settings["seq_len"] == 512


def test_responses_are_sampled_as_trained(monkeypatch, tmp_path):
    asked, sampling = [], {"temperature": 0.7, "top_k": 50, "top_p": 0.95}
    monkeypatch.setattr("vllm_mtpc.regenerate.command.regenerate", lambda values, _: asked.append(values) or values.out)
    values = REQUIRED | sampling | {"head": "ptp", "out": tmp_path, "regenerate": 10}
    assert command.with_responses(parse(values))[0].data == [str(tmp_path / "data" / "sampled.jsonl")]
    assert [(found.temperature, found.top_k, found.top_p, found.limit) for found in asked] == [(0.7, 50, 0.95, 10)]


def test_unused_u_is_reported():
    options, baseline = (parse(REQUIRED | {"head": "ptp", "variant": name}) for name in ("o-ptp", "independent"))
    figure = {"tokens_per_step": 2.0, "standard_error": 0.1, "sequences": 4, "contexts": 9999, "accuracy": 0.5}
    for of, shuffled, warned in ((options, 0.2, False), (options, 0.49, True), (baseline, 0.49, False)):
        results = {"t1": figure | {"shuffled_accuracy": shuffled}}
        lines = PtpTrainer.comments(SimpleNamespace(options=of), results)
        assert any("so u is not used" in line for line in lines) == warned
