"""Options of a training run: file and flags have the same keys, and errors are one line."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from vllm_mtpc.errors import MtpcError, UsageError
from vllm_mtpc.train import command
from vllm_mtpc.train.options import TrainOptions, parse

REQUIRED = {"target": "t", "data": ["d"], "out": "o"}


def typed(*words: str) -> TrainOptions:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.read_options(parser.parse_args(words))


def test_help_has_all_options_and_starts_with_required_ones(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    parser = argparse.ArgumentParser(prog="train")
    command.add_arguments(parser)
    text, flags = parser.format_help(), {flag for action in parser._actions for flag in action.option_strings}
    for name, field in TrainOptions.model_fields.items():
        assert f"--{name.replace('_', '-')}" in flags and field.description
    assert text.startswith("usage: train --target MODEL --data DATA... --out FOLDER [options]\n")
    assert len(text.splitlines()) < 150 and " X " not in text
    begins = [text.index(f"\n{title}:\n") for title in TrainOptions.groups.values()]
    assert begins == sorted(begins)
    names = ("target", "data", "out", "circuit", "gamma", "epochs", "resume,")
    places = [text.index(f"\n  --{name} ") for name in names]
    assert places == sorted(places) and begins[0] < places[0] and places[2] < begins[1] < places[3]


def test_flags_are_converted_and_take_precedence_over_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("target: t\ndata: [d]\nout: o\nwindow: 8\ncircuit: hmm\n")
    o = typed("--config", str(file), "--data", "a", "b", "--window", "4", "--gamma", "0.5", "--train-first", "--cache",
              "c", "--dry-run")  # fmt: skip
    assert (o.data, o.window, o.gamma, o.train_first, o.circuit) == (["a", "b"], 4, 0.5, True, "hmm")
    assert (o.cache, o.dry_run, o.out) == (Path("c"), True, Path("o"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("windows: 8", "unknown key 'windows'; allowed keys: .*window"),
        ("learning_rat: 8", "correct its name$"),
        ("head: medusa", "'medusa'; allowed: linear, shared, backbone, hosted, product, ptp;"),
        ("ptp_loss: ce", "ptp_loss is an option of PTP heads: remove ptp_loss, or set head ptp"),
        ("circuit: tree", "tree"),
        ("gamma: 2", "gamma"),
        ("circuit: ff\ncomponents: 4", "exactly 1; use 'cp'"),
        ("kl: reverse", "unknown key 'kl'"),
        ("lora_layers: 1\ncache: c", "leave out cache"),
        ("lora_layers: 3", "lora_layers"),
        ("freeze_backbone: true", "freeze_backbone needs a trained backbone"),
        ("head: backbone\ntrain_first: true", "train_first with head backbone"),
        ("lora_rank: 8", "lora_rank is of draft layers: remove lora_rank, or set lora_layers to 1, 2 or 4"),
        ("data: [a.txt, b/*.jsonl]\nsplit: test", "split='test' is an option of data sets"),
        ("target: [", "cannot be read as YAML"),
        ("head: ptp\ncircuit: hmm", "circuit is an option of circuits: remove circuit, or set another head"),
        ("head: ptp\ncache: c", "cache is an option of circuits"),
        ("variant: c-ptp", "variant is an option of PTP heads: remove variant, or set head ptp"),
        ("head: shared\ntemperature: 0.5", "temperature is an option of PTP heads"),
        ("head: ptp\nptp_loss: inverse", "ptp_loss 'inverse' with variant 'o-ptp': allowed are ce, bce; set"),
        ("head: ptp\nvariant: c-ptp\nptp_loss: ce", "allowed are kl, reverse-kl, inverse"),
        ("head: ptp\nvariant: independent\nbaseline: b", "it is the baseline itself; remove baseline"),
        ("head: ptp\nproposals: student\nu_beta: 0.5", "its u is uniform; remove u_beta"),
        ("head: ptp\ntemperature: 0", "temperature"),
    ],
)
def test_errors_are_one_line(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(f"target: t\ndata: [d]\nout: o\n{text}\n")
    with pytest.raises(MtpcError, match=message) as caught:
        typed("--config", str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("- a", "holds a list; a mapping is expected"),
        ("target: t", "--data, --out missing; type: vllm-mtpc train"),
    ],
)
def test_bad_file_is_refused(tmp_path, text, message):
    if text:
        (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(MtpcError, match=message):
        typed("--config", str(tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    "values",
    [
        {"lora_rank": 8, "lora_layers": 1},
        {"head": "ptp", "lora_rank": 8, "lora_alpha": 4},
        {"data": ["a.txt", "name:config"], "split": "test"},
        {"data": ["."], "split": "test"},  # a folder may be of parquet files
    ],
)
def test_option_with_effect_is_accepted(values):
    options = parse(REQUIRED | values)
    assert parse(options.model_dump(mode="json")) == options


def test_components_depend_on_the_circuit():
    assert parse(REQUIRED).num_components == 32
    assert parse(REQUIRED | {"circuit": "ff"}).num_components == 1


def test_regeneration_in_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="type vllm-mtpc regenerate first"):
        command.with_responses(parse(REQUIRED | {"regenerate": 4}))
