"""Heads are loaded exactly as saved, and an interrupted save leaves the old head or a refusal."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_mtpc.checkpoint import load_head, save_head
from vllm_mtpc.circuits import CIRCUITS
from vllm_mtpc.errors import MtpcError

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("circuit", CIRCUITS)
def test_round_trip_is_bit_exact_in_the_stored_dtype(tmp_path, new_head, circuit, dtype):
    config, head = new_head(circuit)
    save_head(tmp_path, config, head, {}, "card", dtype)
    expected = {name: value.to(dtype) for name, value in head.state_dict().items()}
    stored = load_file(tmp_path / "model.safetensors")
    read_config, loaded = load_head(tmp_path, dtype)
    assert read_config == config
    for tensors in (stored, loaded.state_dict()):
        assert set(tensors) == set(expected)
        assert all(tensors[name].dtype == dtype and torch.equal(tensors[name], expected[name]) for name in expected)


def test_loaded_head_computes_the_same_parameters(tmp_path, new_head):
    config, head = new_head()
    save_head(tmp_path, config, head, {}, "card", torch.float32)
    _, loaded = load_head(tmp_path)
    hidden = torch.randn(3, config.hidden_size)
    for given, expected in zip(loaded(hidden)[:3], head(hidden)[:3], strict=True):
        assert torch.equal(given, expected)
    assert not loaded.training
    assert not any(value.requires_grad for value in loaded.parameters())


def test_saving_a_loaded_head_writes_the_same_bytes(folder, tmp_path):
    config, head = load_head(folder)
    save_head(tmp_path / "again", config, head, {"command": "train me"}, "# a head\n")
    for file in sorted(folder.iterdir()):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_folder_has_config_weights_card_and_provenance(folder):
    assert sorted(file.name for file in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "provenance.json",
    ]
    assert (folder / "README.md").read_text() == "# a head\n"
    record = json.loads((folder / "provenance.json").read_text())
    assert record["command"] == "train me"
    assert record["versions"]["torch"] == torch.__version__
    assert "python" in record["versions"]


FILES = ["model.safetensors", "README.md", "provenance.json", "config.json"]


@pytest.mark.parametrize("failing", FILES)
@pytest.mark.parametrize("step", ["write", "fsync"])
def test_full_disk_keeps_the_old_head(folder, new_head, monkeypatch, failing, step):
    """Of other shapes: new weights under the old config would not load."""
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    write = Path.write_bytes

    def full(path, data):
        if path.name == f"{failing}.partial" and step == "write":
            write(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        if path.name == f"{failing}.partial":
            monkeypatch.setattr(os, "fsync", no_space)
        return write(path, data)

    def no_space(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        save_head(folder, *new_head("hmm", seed=1), {}, "new card")
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    load_head(folder)


@pytest.mark.parametrize("circuit", ["btree", "hmm"], ids=["same-shapes", "other-shapes"])
@pytest.mark.parametrize("failing", FILES)
def test_save_interrupted_between_renames_leaves_a_head_or_a_refusal(folder, new_head, monkeypatch, circuit, failing):
    old_config, old = load_head(folder)
    config, head = new_head(circuit, seed=1)
    replace = os.replace

    def failing_replace(source, target):
        if os.fspath(target).endswith(failing):
            raise OSError("interrupted")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OSError, match="interrupted"):
        save_head(folder, config, head, {}, "new card")
    monkeypatch.undo()
    assert not list(folder.glob("*.partial"))
    try:
        read_config, loaded = load_head(folder)
    except MtpcError:
        assert circuit != "btree"  # new weights under the old config: refused by their shapes
        assert failing != "model.safetensors"
        return
    assert read_config == old_config
    expected = old if failing == "model.safetensors" else head.half().float()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name])  # all of one head, never a mixture


def test_interrupted_first_save_is_refused(tmp_path, new_head, monkeypatch):
    def fail(source, target):
        if os.fspath(target).endswith("config.json"):
            raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_head(tmp_path, *new_head(), {}, "card")
    with pytest.raises(MtpcError, match=r"config\.json"):
        load_head(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), 1e6], ids=["nan", "beyond-float16"])
def test_unloadable_weights_are_not_saved(folder, new_head, value):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    config, head = new_head("btree", seed=1)
    head.leaf_weight.data[0, 0, 0, 0] = value
    with pytest.raises(MtpcError, match=r"leaf_weight.*float16"):
        save_head(folder, config, head, {}, "new card")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_provenance_that_is_not_json_is_refused_before_writing(folder, new_head):
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(TypeError):
        save_head(folder, *new_head("btree", seed=1), {"when": object()}, "new card")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
