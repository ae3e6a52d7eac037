"""Draft layers travel with their head: saved before its config, found whole or refused whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_mtpc.checkpoint import check_tensors, load_head, read_config, save_head
from vllm_mtpc.checkpoint.inspect import inspect_head
from vllm_mtpc.cli import main
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.adapters import DraftLayers

torch.set_num_threads(1)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LLAMA = LlamaConfig(
    vocab_size=7,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)


def new(seed: int = 0, layers: int = 2, alpha: int = 4) -> tuple[HeadConfig, torch.nn.Module, DraftLayers]:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LLAMA).eval().requires_grad_(False)
    # What DraftLayers reads of a target; loading one from a folder is tested in tests/heads/test_adapters.py.
    target = SimpleNamespace(model=model, backbone=model.model, name="llama", device=torch.device("cpu"))
    target.attention = "torch"
    split = DraftLayers(target, layers, rank=2, alpha=alpha)
    for value in split.parameters():
        value.data.normal_()
    settings = {"window": 4, "num_components": 2, "verifier": "../target", "lora_layers": layers}
    config = HeadConfig.create(circuit="btree", target=LLAMA, **settings)
    return config, build_head(config), split


def save(folder: Path, config, head, split) -> None:
    save_head(folder, config, head, {"command": "train me"}, "card", draft_layers=split)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "head", *new())
    return tmp_path / "head"


def refusal(folder: Path) -> str:
    """The one line load_head, check_tensors and inspect refuse a folder with."""
    lines = []
    for check in (load_head, lambda place: check_tensors(place, read_config(place)), inspect_head):
        with pytest.raises(MtpcError) as caught:
            check(folder)
        lines.append(str(caught.value))
    assert len(set(lines)) == 1 and "\n" not in lines[0]
    return lines[0]


def rewrite(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def edit(folder: Path, **changes: object) -> None:
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**values, **changes}))


def test_adapters_are_saved_and_loaded_with_their_head(tmp_path: Path) -> None:
    config, head, split = new()
    save(tmp_path, config, head, split)
    assert {CONFIG, WEIGHTS} <= {file.name for file in tmp_path.iterdir()}
    assert load_head(tmp_path)[0] == config
    loaded = DraftLayers.load(tmp_path, split._target[0])
    expected = split.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert json.loads((tmp_path / CONFIG).read_text())["base_model_name_or_path"] == "../target"


def test_inspect_shows_the_adapters_and_the_expander(folder: Path, tmp_path: Path, capsys) -> None:
    report = inspect_head(folder)
    modules = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    parameters = 2 * 2 * sum([8 + 8, 8 + 4, 8 + 4, 8 + 8, 8 + 12, 8 + 12, 12 + 8])
    assert report["adapters"] == {
        "layers": [1, 2],
        "rank": 2,
        "alpha": 4,
        "modules": modules,
        "parameters": parameters,
    }
    assert main(["inspect", str(folder)]) == 0
    assert f"1, 2 of the target, rank 2, alpha 4, {parameters} parameters" in capsys.readouterr().out
    config = HeadConfig.create(
        circuit="cp", window=4, num_components=2, target=LLAMA, verifier="../target", head="shared", expander_rank=5
    )
    save_head(tmp_path / "shared", config, build_head(config), {}, "card")
    assert inspect_head(tmp_path / "shared")["expander"] == {"expander_rank": 5}
    assert main(["inspect", str(tmp_path / "shared")]) == 0
    assert "shared, expander_rank 5" in (shown := capsys.readouterr().out) and "none" in shown


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert f"has no {name}" in (text := refusal(folder)) and "lora_layers=2" in text


def test_adapters_of_another_save_are_refused(folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "other", *new(seed=1))
    (folder / WEIGHTS).write_bytes((tmp_path / "other" / WEIGHTS).read_bytes())
    assert "not those model.safetensors was saved with" in refusal(folder)


def test_a_scale_of_another_save_is_refused(folder: Path) -> None:
    """Nothing in a shape shows it."""
    edit(folder, lora_alpha=8)
    assert "not those model.safetensors was saved with" in refusal(folder)


def test_a_damaged_weight_file_is_refused(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    for damaged in (b"", data[:-1], data[:100]):
        (folder / WEIGHTS).write_bytes(damaged)
        assert WEIGHTS in refusal(folder)


Q_B = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda tensors: tensors.pop(Q_B), [f"missing: {Q_B}"]),
        (lambda tensors: tensors.clear(), ["missing"]),
        (lambda tensors: tensors.update(surplus=torch.zeros(2)), ["unknown tensor(s): surplus"]),
        (lambda tensors: tensors.update({Q_B.replace("layers.1", "layers.0"): torch.zeros(8, 2)}), ["layers.0"]),
        (lambda tensors: tensors.update({Q_B: torch.zeros(8, 3)}), ["(8, 3)", "(out, 2)"]),
        (lambda tensors: tensors.update({Q_B: torch.zeros(16)}), ["(16,)", "(out, 2)"]),
        (lambda tensors: tensors.update({Q_B: torch.zeros(8, 2, dtype=torch.int32)}), ["int32", "float32"]),
        (lambda tensors: tensors[Q_B][3].fill_(float("nan")), ["NaN", Q_B]),
    ],
)
def test_wrong_tensors_are_named(folder: Path, change, words: list[str]) -> None:
    rewrite(folder, change)
    assert all(word in refusal(folder) for word in words), refusal(folder)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"peft_type": "IA3"}, ["peft_type", "'IA3'", "'LORA'"]),
        ({"r": 0}, ["r = 0", "from 1"]),
        ({"r": True}, ["r = True"]),
        ({"lora_alpha": "16"}, ["lora_alpha", "'16'"]),
        ({"target_modules": []}, ["target_modules"]),
        ({"layers_to_transform": [2]}, ["layers_to_transform = [2]", "last 2 layers", "[1, 2]"]),
        ({"layers_to_transform": [0, 1]}, ["layers_to_transform = [0, 1]", "[1, 2]"]),
        ({"layers_to_transform": None}, ["layers_to_transform = None"]),
    ],
)
def test_a_wrong_config_is_named(folder: Path, changes: dict, words: list[str]) -> None:
    edit(folder, **changes)
    assert all(word in refusal(folder) for word in words), refusal(folder)


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_config_that_is_not_an_object_is_refused(folder: Path, content: str) -> None:
    (folder / CONFIG).write_text(content)
    assert CONFIG in refusal(folder)


@pytest.mark.parametrize("given, layers", [(None, 2), ("one", 2), ("two", 0)])
def test_a_head_is_not_saved_with_other_draft_layers_than_its_config_says(tmp_path: Path, given, layers) -> None:
    splits = {None: None, "one": new(layers=1)[2], "two": new()[2]}
    config, head, _ = new()
    with pytest.raises(MtpcError, match=f"lora_layers={layers}"):
        save(tmp_path / "head", config.model_copy(update={"lora_layers": layers}), head, splits[given])
    assert not (tmp_path / "head").exists()


def test_adapters_that_are_not_finite_are_not_saved(folder: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    config, head, split = new(seed=1)
    next(split.parameters()).data[0, 0] = float("inf")
    with pytest.raises(MtpcError, match="NaN or infinity"):
        save(folder, config, head, split)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_head_without_draft_layers_leaves_no_old_adapters(folder: Path) -> None:
    config, head, _ = new()
    save(folder, config.model_copy(update={"lora_layers": 0}), head, None)
    assert not {CONFIG, WEIGHTS} & {file.name for file in folder.iterdir()}
    load_head(folder)


@pytest.mark.parametrize(
    "failing", ["model.safetensors", WEIGHTS, CONFIG, "README.md", "provenance.json", "config.json"]
)
def test_a_save_that_fails_half_way_leaves_one_head_or_a_refusal(folder: Path, monkeypatch, failing: str) -> None:
    """Never the weights of one head with the adapters of another, although both have the shapes of the config."""
    (old_config, old), old_adapters = load_head(folder), load_file(folder / WEIGHTS)
    config, head, split = new(seed=1, alpha=8)
    replace = os.replace

    def failing_replace(source, target):
        if Path(target).name == failing:
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OSError, match="disk full"):
        save(folder, config, head, split)
    monkeypatch.undo()
    assert not list(folder.glob("*.partial"))
    if failing in (WEIGHTS, CONFIG):
        refusal(folder)
        return
    _, loaded = load_head(folder)
    is_old = failing == "model.safetensors"
    expected = old if is_old else head.half().float()
    assert torch.equal(loaded.leaf_weight, expected.leaf_weight)
    assert torch.equal(load_file(folder / WEIGHTS)[Q_B], old_adapters[Q_B]) == is_old
    assert old_config == config
