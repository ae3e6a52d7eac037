"""PTP heads on disk: read back as saved, readable by PEFT, found whole or refused whole."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.files import mutate
from vllm_mtpc.checkpoint import check_ptp, check_tensors, load_head, load_ptp, read_config, save_head, save_ptp
from vllm_mtpc.checkpoint.inspect import inspect_head
from vllm_mtpc.checkpoint.load import read_circuit_config
from vllm_mtpc.cli import main
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.config.ptp import PtpConfig
from vllm_mtpc.errors import CheckpointError, MtpcError
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.adapters import MODULES
from vllm_mtpc.heads.ptp.embedding import EMBEDDINGS, build_embedding
from vllm_mtpc.heads.ptp.late import build_late
from vllm_mtpc.plots import command as plot_command

torch.set_num_threads(1)
ADAPTER, ADAPTER_WEIGHTS, U_EMBED = "adapter_config.json", "adapter_model.safetensors", "u_embed.safetensors"
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DOWN_B = "base_model.model.model.layers.2.mlp.down_proj.lora_B.weight"
LLAMA = LlamaConfig(
    vocab_size=7,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)
# A and B, rank 2, of the seven projections of three layers
PARAMETERS = 3 * 2 * sum([8 + 8, 8 + 4, 8 + 4, 8 + 8, 8 + 12, 8 + 12, 12 + 8])


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA).eval().requires_grad_(False)


def adapted(seed: int = 0) -> PeftModel:
    """PEFT's own model with random adapters."""
    model = get_peft_model(llama(), LoraConfig(r=2, lora_alpha=6, target_modules=list(MODULES))).eval()
    torch.manual_seed(seed)
    for name, value in model.named_parameters():
        if ".lora_" in name:
            value.data.normal_()
    return model


def new(seed: int = 0, **settings) -> tuple[PtpConfig, dict[str, torch.Tensor], torch.nn.Module]:
    settings = {"variant": "o-ptp", "window": 4, "lora_rank": 2, "lora_alpha": 6.0, "verifier": "../target"} | settings
    config = PtpConfig.create(target=LLAMA, **settings)
    lora = get_peft_model_state_dict(adapted(seed))
    return config, lora, build_embedding(config.u_embedding, 8, config.u_features, config.u_hidden)


def save(folder: Path, config, lora, embedding, dtype=torch.float16) -> None:
    late = build_late(8, config.late_width)
    save_ptp(folder, config, lora, embedding, {"command": "train me"}, "# a head\n", dtype, late)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "head", *new())
    return tmp_path / "head"


def refusal(folder: Path) -> str:
    """The one line load_ptp, check_ptp, check_tensors and inspect refuse a folder with."""
    lines = []
    checks = (
        load_ptp,
        lambda place: check_ptp(place, read_config(place)),
        lambda place: check_tensors(place, read_config(place)),
        inspect_head,
    )
    for check in checks:
        with pytest.raises(MtpcError) as caught:
            check(folder)
        lines.append(str(caught.value))
    assert len(set(lines)) == 1 and "\n" not in lines[0]
    assert str(folder) in lines[0]
    return lines[0]


def rewrite(folder: Path, file: str, change) -> None:
    """Change a tensor file and keep its metadata."""
    with safe_open(folder / file, "pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata=metadata)


def edit(folder: Path, file: str, **changes: object) -> None:
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**values, **changes}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("u_embedding", EMBEDDINGS)
def test_a_head_is_read_back_as_saved(tmp_path: Path, u_embedding: str, dtype: torch.dtype) -> None:
    config, lora, embedding = new(u_embedding=u_embedding, variant="c-ptp", accepted=[0.5, 0.5, 0, 0])
    save(tmp_path / "head", config, lora, embedding, dtype)
    head = load_ptp(tmp_path / "head")
    assert head.config == read_config(tmp_path / "head") == config
    assert head.lora.keys() == lora.keys()
    assert all(torch.equal(value, lora[name].to(dtype).float()) for name, value in head.lora.items())
    assert all(value.dtype is torch.float32 for value in head.lora.values())
    u = torch.rand(9)
    assert torch.equal(head.embedding(u), embedding.to(dtype).float()(u))
    assert not any(value.requires_grad for value in head.embedding.parameters())
    assert {file.name for file in (tmp_path / "head").iterdir()} == {
        *("config.json", ADAPTER, ADAPTER_WEIGHTS, U_EMBED, "README.md", "provenance.json")
    }


def test_a_late_network_is_read_back_as_saved(tmp_path: Path) -> None:
    config, lora, embedding = new(variant="late", late_width=3, distribution_trust=0.8)
    late = build_late(8, 3)
    late.outer.weight.data.normal_()
    save_ptp(tmp_path, config, lora, embedding, {"command": "train me"}, "# a head\n", torch.float16, late)
    head = load_ptp(tmp_path)
    hidden, tokens, u = torch.randn(2, 4, 8), torch.randn(2, 4, 8), torch.rand(9)
    assert torch.equal(head.late(hidden, tokens), late.half().float()(hidden, tokens))
    assert not any(value.requires_grad for value in head.late.parameters())
    assert torch.equal(head.embedding(u), embedding.half().float()(u))
    assert inspect_head(tmp_path)["late_width"] == 3 and inspect_head(tmp_path)["distribution_trust"] == 0.8


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda tensors: tensors.pop("late.token.weight"), ["missing: late.token.weight"]),
        (lambda tensors: tensors.update({"late.state.bias": torch.zeros(4)}), ["(4,)", "(3,)", "late_width"]),
        (lambda tensors: tensors["late.outer.weight"][1].fill_(float("nan")), ["NaN", "'late.outer.weight'"]),
    ],
)
def test_wrong_tensors_of_the_late_network_are_named(tmp_path: Path, change, words: list[str]) -> None:
    save(tmp_path / "head", *new(variant="late", late_width=3))
    rewrite(tmp_path / "head", U_EMBED, change)
    text = refusal(tmp_path / "head")
    assert U_EMBED in text and all(word in text for word in words), text


def test_a_config_without_the_late_network_of_its_files_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "head", *new(variant="late", late_width=3))
    values = json.loads((tmp_path / "head" / "config.json").read_text())
    for key in ("late_width", "distribution_trust"):
        del values[key]
    (tmp_path / "head" / "config.json").write_text(json.dumps(values | {"variant": "independent"}))
    assert "variant 'late'" in (text := refusal(tmp_path / "head")) and "'independent'" in text


def test_a_head_is_loaded_in_the_asked_dtype(folder: Path) -> None:
    head = load_ptp(folder, torch.bfloat16)
    assert {value.dtype for value in [*head.lora.values(), *head.embedding.parameters()]} == {torch.bfloat16}


def test_peft_reads_the_adapters(tmp_path: Path) -> None:
    """Its model on the plain target gives the logits of the model the adapters were taken from."""
    save(tmp_path, *new(), torch.float32)
    tokens = torch.arange(7)[None]
    expected = adapted()(tokens).logits
    assert torch.equal(PeftModel.from_pretrained(llama(), tmp_path).eval()(tokens).logits, expected)
    assert not torch.allclose(llama()(tokens).logits, expected)
    values = json.loads((tmp_path / ADAPTER).read_text())
    assert (values["r"], values["lora_alpha"], values["layers_to_transform"]) == (2, 6, None)
    assert values["target_modules"] == sorted(MODULES)
    assert values["base_model_name_or_path"] == "../target"


def test_check_ptp_says_what_the_adapters_are(folder: Path) -> None:
    info = check_ptp(folder, read_config(folder))
    assert info == ([0, 1, 2], 2, 6.0, sorted(MODULES), PARAMETERS)


def test_inspect_shows_the_head(tmp_path: Path, capsys) -> None:
    save(tmp_path / "head", *new(u_embedding="arithmetic-mlp", u_hidden=3, accepted=[0.5, 0.25, 0.25, 0.0]))
    report = inspect_head(tmp_path / "head")
    expected = {
        "method": "ptp",
        "variant": "o-ptp",
        "window": 4,
        "drafts_per_step": 3,
        "u_embedding": "arithmetic-mlp",
        "u_options": {"u_features": 32, "u_hidden": 3},
        "accepted": [0.5, 0.25, 0.25, 0.0],
        "parameters": PARAMETERS + 32 * 3 + 3 + 3 * 8 + 8,
        "trained_sampling": {"temperature": 1.0, "top_k": 0, "top_p": 1.0},
    }
    assert {key: report[key] for key in expected} == expected
    assert report["adapters"]["parameters"] == PARAMETERS
    assert {Q_A, DOWN_B, "inner.weight", "outer.bias"} <= report["weights"]["tensors"].keys()
    assert main(["inspect", str(tmp_path / "head")]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in [
        "o-ptp",
        "4 auxiliary rows",
        "arithmetic-mlp, u_features 32, u_hidden 3",
        "all 3 layers",
        f"{PARAMETERS} parameters",
        "0.75 of 3",
        "0: 50.0%",
        "weights: ok (46 tensors",
    ]:
        assert words in text, words
    save(tmp_path / "other", *new(variant="late", late_width=5))
    assert main(["inspect", str(tmp_path / "other")]) == 0
    text = capsys.readouterr().out
    assert "width 5, trust 0.85" in text and "not measured" in text


def test_each_kind_of_head_is_refused_where_the_other_is_needed(folder: Path, tmp_path: Path) -> None:
    for read in (load_head, read_circuit_config, lambda place: plot_command.read(str(place))):
        with pytest.raises(CheckpointError, match=r'of method ptp; here one of method mtpc.*"method": "ptp"'):
            read(folder)
    config = HeadConfig.create(circuit="cp", window=4, num_components=2, target=LLAMA, verifier="../target")
    save_head(tmp_path / "circuit", config, build_head(config), {}, "card")
    with pytest.raises(CheckpointError, match=r'of method mtpc; here one of method ptp.*"method": "mtpc"'):
        load_ptp(tmp_path / "circuit")


def test_a_head_of_the_other_kind_leaves_no_weights_behind(folder: Path) -> None:
    config = HeadConfig.create(circuit="cp", window=4, num_components=2, target=LLAMA, verifier="../target")
    save_head(folder, config, build_head(config), {}, "card")
    assert {file.name for file in folder.iterdir()} == {
        *("config.json", "model.safetensors", "README.md", "provenance.json")
    }
    save(folder, *new())
    assert not (folder / "model.safetensors").exists()
    load_ptp(folder)


@pytest.mark.parametrize("name", [ADAPTER, ADAPTER_WEIGHTS, U_EMBED])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert name in refusal(folder)


def test_pickled_weights_are_not_loaded(folder: Path) -> None:
    (folder / U_EMBED).unlink()
    torch.save({}, folder / "u_embed.pt")
    assert "u_embed.pt: pickled weights are never loaded" in refusal(folder)
    assert "save_ptp" in refusal(folder)


@pytest.mark.parametrize("name", [ADAPTER, ADAPTER_WEIGHTS, U_EMBED])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe{}"])
def test_a_damaged_file_is_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert name in refusal(folder)


@pytest.mark.parametrize(
    "file, change, words",
    [
        (U_EMBED, lambda tensors: tensors.pop("outer.bias"), ["missing: outer.bias"]),
        (U_EMBED, lambda tensors: tensors.update(more=torch.zeros(2)), ["unknown", "more", "outer.bias, outer.weight"]),
        (U_EMBED, lambda tensors: tensors.update({"outer.bias": torch.zeros(9)}), ["(9,)", "(8,)", "hidden_size"]),
        (U_EMBED, lambda tensors: tensors.update({"outer.bias": torch.zeros(8).int()}), ["int32", "float16"]),
        (U_EMBED, lambda tensors: tensors["outer.weight"][3].fill_(float("nan")), ["NaN", "'outer.weight'"]),
    ],
)
def test_wrong_tensors_of_the_embedding_are_named(folder: Path, file: str, change, words: list[str]) -> None:
    rewrite(folder, file, change)
    text = refusal(folder)
    assert U_EMBED in text
    assert all(word in text for word in words), text


def resign(folder: Path) -> None:
    """The digest of the adapters as they are now: only what they hold can be wrong."""
    from vllm_mtpc.checkpoint.load import ADAPTER_DIGEST, ADAPTER_FILES, adapter_digest

    with safe_open(folder / U_EMBED, "pt") as handle:
        metadata = handle.metadata()
    digest = adapter_digest({name: (folder / name).read_bytes() for name in ADAPTER_FILES})
    save_file(load_file(folder / U_EMBED), folder / U_EMBED, metadata={**metadata, ADAPTER_DIGEST: digest})


def rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda tensors: tensors.pop(Q_A), ["missing", Q_A]),
        (lambda tensors: tensors.update({Q_A.replace("layers.0", "layers.3"): torch.zeros(2, 8)}), ["unknown", "3"]),
        (lambda tensors: tensors.update({"lm_head.weight": torch.zeros(7, 8)}), ["unknown", "lm_head.weight"]),
        (lambda tensors: tensors.update({Q_A: torch.zeros(3, 8)}), [Q_A, "(3, 8)", "(2, 8)"]),
        (lambda tensors: tensors.update({Q_A: torch.zeros(2, 9)}), [Q_A, "(2, 9)", "(2, 8)", "hidden_size"]),
        (lambda tensors: tensors.update({DOWN_B: torch.zeros(12, 2)}), [DOWN_B, "(12, 2)", "(8, 2)"]),
        (lambda tensors: tensors[Q_A][1].fill_(float("inf")), ["NaN or infinity", Q_A]),
        (lambda tensors: tensors.update({Q_A: torch.zeros(2, 8).int()}), ["int32"]),
        (lambda tensors: rename(tensors, "q_proj", "qkv_proj"), ["target_modules", "qkv_proj"]),
        (lambda tensors: tensors.clear(), ["missing"]),
    ],
)
def test_wrong_adapters_are_named(folder: Path, change, words: list[str]) -> None:
    rewrite(folder, ADAPTER_WEIGHTS, change)
    resign(folder)
    text = refusal(folder)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"r": 3}, ["r = 3", "lora_rank=2"]),
        ({"r": 0}, ["r = 0", "from 1"]),
        ({"lora_alpha": 16}, ["lora_alpha = 16", "lora_alpha=6"]),
        ({"peft_type": "IA3"}, ["'IA3'", "'LORA'"]),
        ({"layers_to_transform": [1, 2]}, ["layers_to_transform = [1, 2]", "every layer"]),
        ({"target_modules": ["q_proj"]}, ["target_modules is q_proj", "v_proj"]),
        ({"target_modules": [*MODULES, "lm_head"]}, ["lm_head", "allowed: q_proj"]),
        ({"use_rslora": True}, ["use_rslora = True"]),
        ({"alpha_pattern": {"q_proj": 3}}, ["alpha_pattern"]),
    ],
)
def test_a_wrong_adapter_config_is_named(folder: Path, changes: dict, words: list[str]) -> None:
    edit(folder, ADAPTER, **changes)
    resign(folder)
    text = refusal(folder)
    assert all(word in text for word in words), text


def test_adapters_of_another_head_are_refused(folder: Path, tmp_path: Path) -> None:
    """Of the same shapes: only the digest tells."""
    save(tmp_path / "other", *new(seed=1))
    (folder / ADAPTER_WEIGHTS).write_bytes((tmp_path / "other" / ADAPTER_WEIGHTS).read_bytes())
    assert f"are not those {U_EMBED} was saved with" in refusal(folder)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"variant": "c-ptp"}, ["variant 'o-ptp'", "'c-ptp'"]),
        ({"informed": False}, ["unknown key 'informed'"]),
        ({"u_embedding": "threshold", "u_features": 32}, ["u_embedding 'ieee'", "'threshold'"]),
        ({"hidden_size": 9}, ["(8,", "(9,", "hidden_size"]),
        ({"lora_rank": 3}, ["r = 2", "lora_rank=3"]),
        ({"circuit": "cp"}, ["unknown key 'circuit'", "u_embedding"]),
        ({"format_version": 3}, ["format_version", "reads formats 1 and 2"]),
        ({"accepted": [0.5, 0.5]}, ["accepted has 2 entries"]),
        ({"accepted": [0.5, 0.25, 0, 0]}, ["sum is 0.75"]),
    ],
)
def test_a_config_that_is_not_the_weights_is_refused(folder: Path, changes: dict, words: list[str]) -> None:
    edit(folder, "config.json", **changes)
    text = refusal(folder)
    assert all(word in text for word in words), text


def test_a_config_with_more_layers_than_the_adapters_is_refused(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    edit(folder, "config.json", transformer_layer_config={**values, "num_hidden_layers": 4})
    assert "layers.3." in refusal(folder)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda lora, embedding: lora.pop(Q_A), ["missing", Q_A]),
        (lambda lora, embedding: lora.update({Q_A: torch.zeros(3, 8)}), ["(3, 8)"]),
        (lambda lora, embedding: lora[Q_A].fill_(1e9), ["NaN or infinity as torch.float16"]),
        (lambda lora, embedding: embedding.outer.bias.data.fill_(float("nan")), ["NaN", "outer.bias"]),
        (lambda lora, embedding: embedding.register_parameter("more", embedding.outer.bias), ["unknown", "more"]),
        (lambda lora, embedding: rename(lora, "q_proj", "qkv_proj"), ["qkv_proj", "allowed: q_proj"]),
    ],
)
def test_what_would_be_refused_is_not_saved(folder: Path, change, words: list[str]) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    config, lora, embedding = new(seed=1)
    change(lora, embedding)
    with pytest.raises(CheckpointError) as caught:
        save(folder, config, lora, embedding)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("failing", [U_EMBED, ADAPTER_WEIGHTS, ADAPTER, "README.md", "provenance.json", "config.json"])
def test_a_save_that_fails_half_way_leaves_one_head_or_a_refusal(folder: Path, monkeypatch, failing: str) -> None:
    """Never the adapters of one head with the embedding of another, nor an o-ptp head called c-ptp."""
    old, config_and_weights = load_ptp(folder), new(seed=1, variant="c-ptp")
    replace = os.replace

    def failing_replace(source, target):
        if Path(target).name == failing:
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OSError, match="disk full"):
        save(folder, *config_and_weights)
    monkeypatch.undo()
    assert not list(folder.glob("*.partial"))
    if failing != U_EMBED:
        refusal(folder)
        return
    head = load_ptp(folder)
    assert head.config == old.config and all(torch.equal(head.lora[name], old.lora[name]) for name in old.lora)


@pytest.mark.parametrize("name", ["config.json", ADAPTER, ADAPTER_WEIGHTS, U_EMBED])
def test_whatever_is_changed_a_head_loads_or_is_refused_in_one_line(folder: Path, name: str) -> None:
    """Random damage to a JSON file or the header of a tensor file, every other one under a digest that fits it."""
    rng, file, loaded, rounds = random.Random(0), folder / name, 0, 80
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    original = whole[name]
    size = 0 if name.endswith("json") else struct.unpack("<Q", original[:8])[0]
    for turn in range(rounds):
        for other, data in whole.items():
            (folder / other).write_bytes(data)
        if size:
            header = mutate(original[8 : 8 + size], rng)
            file.write_bytes(struct.pack("<Q", len(header)) + header + original[8 + size :])
        else:
            file.write_bytes(mutate(original, rng))
        if name in (ADAPTER, ADAPTER_WEIGHTS) and turn % 2:
            resign(folder)
        try:
            load_ptp(folder)
            loaded += 1
        except MtpcError as error:
            assert len(str(error).splitlines()) == 1
    assert loaded < rounds / 2  # the changes do damage
