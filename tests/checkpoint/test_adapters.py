"""Adapters of draft layers are saved and loaded with their head, or refused whole."""

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
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.adapters import DraftLayers

torch.set_num_threads(1)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SIZES = dict(vocab_size=7, hidden_size=8, intermediate_size=12, num_hidden_layers=3)
LLAMA = LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1, head_dim=4)


def new(seed: int = 0, layers: int = 2, alpha: int = 4) -> tuple[HeadConfig, torch.nn.Module, DraftLayers]:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LLAMA).eval().requires_grad_(False)
    # the attributes that DraftLayers reads
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
    """The one line of all readers."""
    lines = []
    for check in (load_head, lambda place: check_tensors(place, read_config(place)), inspect_head):
        with pytest.raises(MtpcError) as caught:
            check(folder)
        lines.append(str(caught.value))
    assert len(set(lines)) == 1 and "\n" not in lines[0]
    return lines[0]


def rewrite(change):
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return edit


def edit_json(**changes: object):
    return lambda folder: (folder / CONFIG).write_text(
        json.dumps({**json.loads((folder / CONFIG).read_text()), **changes})
    )


def write(name: str, content: bytes | int):
    """Write a file, or keep its first bytes."""
    return lambda folder: (folder / name).write_bytes(
        content if isinstance(content, bytes) else (folder / name).read_bytes()[:content]
    )


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
    shown = {"layers": [1, 2], "rank": 2, "alpha": 4, "modules": modules, "parameters": parameters}
    assert report["adapters"] == shown
    assert main(["inspect", str(folder)]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f"layers 1, 2, rank 2, alpha 4, modules {', '.join(modules)}, parameters {parameters}" in text
    config = HeadConfig.create(
        circuit="cp", window=4, num_components=2, target=LLAMA, verifier="../target", head="shared", expander_rank=5
    )
    save_head(tmp_path / "shared", config, build_head(config), {}, "card")
    assert inspect_head(tmp_path / "shared")["expander"] == {"expander_rank": 5}
    assert main(["inspect", str(tmp_path / "shared")]) == 0
    assert "expander rank 5" in capsys.readouterr().out


def of_another_head(folder: Path) -> None:
    save(folder.parent / "other", *new(seed=1))
    (folder / WEIGHTS).write_bytes((folder.parent / "other" / WEIGHTS).read_bytes())


Q_B = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
OTHER_SAVE = "not those model.safetensors was saved with"


@pytest.mark.parametrize(
    "damage, words",
    [
        *(
            (lambda folder, name=name: (folder / name).unlink(), [f"has no {name}", "lora_layers=2"])
            for name in (CONFIG, WEIGHTS)
        ),
        (of_another_head, [OTHER_SAVE]),
        (edit_json(lora_alpha=8), [OTHER_SAVE]),  # no shape shows it
        *((write(WEIGHTS, content), [WEIGHTS]) for content in (b"", 100, -1)),
        *((write(CONFIG, content), [CONFIG]) for content in (b"", b"[]", b"{")),
        (rewrite(lambda found: found.pop(Q_B)), [f"missing: {Q_B}"]),
        (rewrite(lambda found: found.update(surplus=torch.zeros(2))), ["unknown tensor(s): surplus"]),
        (rewrite(lambda found: found.update({Q_B.replace("s.1", "s.0"): torch.zeros(8, 2)})), ["layers.0"]),
        (rewrite(lambda found: found.update({Q_B: torch.zeros(8, 3)})), ["(8, 3)", "(any, 2)"]),
        (rewrite(lambda found: found.update({Q_B: torch.zeros(16)})), ["(16,)", "(any, 2)"]),
        (edit_json(r=True), ["'r' = True"]),
        (edit_json(lora_alpha="16"), ["lora_alpha", "'16'"]),
        (edit_json(target_modules=[]), ["target_modules"]),
        (edit_json(layers_to_transform=[2]), ["layers_to_transform = [2]", "last 2 layers", "[1, 2]"]),
        (edit_json(layers_to_transform=[0, 1]), ["layers_to_transform = [0, 1]", "[1, 2]"]),
        (edit_json(layers_to_transform=None), ["layers_to_transform = None"]),
    ],
)
def test_damaged_adapters_are_refused(folder: Path, damage, words: list[str]) -> None:
    damage(folder)
    text = refusal(folder)
    assert all(word in text for word in words), text


@pytest.mark.parametrize("given, layers", [(None, 2), ("one", 2), ("two", 0)])
def test_draft_layers_must_be_those_of_the_config_to_be_saved(tmp_path: Path, given, layers) -> None:
    splits = {None: None, "one": new(layers=1)[2], "two": new()[2]}
    config, head, _ = new()
    with pytest.raises(MtpcError, match=f"lora_layers={layers}"):
        save(tmp_path / "head", config.model_copy(update={"lora_layers": layers}), head, splits[given])
    assert not (tmp_path / "head").exists()


def test_infinite_adapters_are_not_saved(folder: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    config, head, split = new(seed=1)
    next(split.parameters()).data[0, 0] = float("inf")
    with pytest.raises(MtpcError, match="NaN or infinity"):
        save(folder, config, head, split)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_head_without_draft_layers_removes_old_adapters(folder: Path) -> None:
    config, head, _ = new()
    save(folder, config.model_copy(update={"lora_layers": 0}), head, None)
    assert not {CONFIG, WEIGHTS} & {file.name for file in folder.iterdir()}
    load_head(folder)


@pytest.mark.parametrize(
    "failing", ["model.safetensors", WEIGHTS, CONFIG, "README.md", "provenance.json", "config.json"]
)
def test_interrupted_save_leaves_one_head_or_a_refusal(folder: Path, monkeypatch, failing: str) -> None:
    """Never the weights of one head with the adapters of another of the same shapes."""
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
