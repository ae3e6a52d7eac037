"""PTP heads on disk: saved and loaded exactly, readable by PEFT, loaded whole or refused whole."""

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
from vllm_mtpc.checkpoint.load import ADAPTER_DIGEST, ADAPTER_FILES, adapter_digest, read_circuit_config
from vllm_mtpc.cli import main
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.config.ptp_config import PtpConfig
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
SIZES = dict(vocab_size=7, hidden_size=8, intermediate_size=12, num_hidden_layers=3)
LLAMA = LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
# A and B, rank 2, of the seven projections of three layers
PARAMETERS = 3 * 2 * sum([8 + 8, 8 + 4, 8 + 4, 8 + 8, 8 + 12, 8 + 12, 12 + 8])


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA).eval().requires_grad_(False)


def adapted_model(seed: int = 0) -> PeftModel:
    """PEFT's own model with random adapters."""
    model = get_peft_model(llama(), LoraConfig(r=2, lora_alpha=6, target_modules=list(MODULES))).eval()
    torch.manual_seed(seed)
    for name, value in model.named_parameters():
        if ".lora_" in name:
            value.data.normal_()
    return model


def new_head(seed: int = 0, **settings) -> tuple[PtpConfig, dict[str, torch.Tensor], torch.nn.Module]:
    settings = {"variant": "o-ptp", "window": 4, "lora_rank": 2, "lora_alpha": 6.0, "verifier": "../target"} | settings
    config = PtpConfig.create(target=LLAMA, **settings)
    lora = get_peft_model_state_dict(adapted_model(seed))
    return config, lora, build_embedding(config.u_embedding, 8, config.u_features, config.u_hidden)


def save(folder: Path, config, lora, embedding, dtype=torch.float16) -> None:
    late = build_late(8, config.late_width)
    save_ptp(folder, config, lora, embedding, {"command": "train me"}, "# a head\n", dtype, late)


def save_circuit(folder: Path) -> None:
    config = HeadConfig.create(circuit="cp", window=4, num_components=2, target=LLAMA, verifier="../target")
    save_head(folder, config, build_head(config), {}, "card")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "head", *new_head())
    return tmp_path / "head"


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def refusal(folder: Path) -> str:
    """The one line of all readers."""
    lines = []
    for read in (
        load_ptp,
        lambda place: check_ptp(place, read_config(place)),
        lambda place: check_tensors(place, read_config(place)),
        inspect_head,
    ):
        with pytest.raises(MtpcError) as caught:
            read(folder)
        lines.append(str(caught.value))
    assert len(set(lines)) == 1 and "\n" not in lines[0] and str(folder) in lines[0]
    return lines[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("u_embedding", EMBEDDINGS)
def test_head_is_loaded_as_saved(tmp_path: Path, u_embedding: str, dtype: torch.dtype) -> None:
    config, lora, embedding = new_head(u_embedding=u_embedding, variant="c-ptp", accepted=[0.5, 0.5, 0, 0])
    save(tmp_path / "head", config, lora, embedding, dtype)
    head = load_ptp(tmp_path / "head")
    assert head.config == read_config(tmp_path / "head") == config
    assert head.lora.keys() == lora.keys()
    assert all(torch.equal(value, lora[name].to(dtype).float()) for name, value in head.lora.items())
    assert all(value.dtype is torch.float32 for value in head.lora.values())
    u = torch.rand(9)
    assert torch.equal(head.embedding(u), embedding.to(dtype).float()(u))
    assert not any(value.requires_grad for value in head.embedding.parameters())
    head = load_ptp(tmp_path / "head", torch.bfloat16)
    assert {value.dtype for value in [*head.lora.values(), *head.embedding.parameters()]} == {torch.bfloat16}
    files = {"config.json", ADAPTER, ADAPTER_WEIGHTS, U_EMBED, "README.md", "provenance.json"}
    assert contents(tmp_path / "head").keys() == files


def test_late_network_is_loaded_as_saved(tmp_path: Path) -> None:
    config, lora, embedding = new_head(variant="late", late_width=3, distribution_trust=0.8)
    late = build_late(8, 3)
    late.outer.weight.data.normal_()
    save_ptp(tmp_path, config, lora, embedding, {"command": "train me"}, "# a head\n", torch.float16, late)
    head = load_ptp(tmp_path)
    hidden, tokens, u = torch.randn(2, 4, 8), torch.randn(2, 4, 8), torch.rand(9)
    assert torch.equal(head.late(hidden, tokens), late.half().float()(hidden, tokens))
    assert not any(value.requires_grad for value in head.late.parameters())
    assert torch.equal(head.embedding(u), embedding.half().float()(u))
    assert inspect_head(tmp_path)["late_width"] == 3 and inspect_head(tmp_path)["distribution_trust"] == 0.8


def test_peft_reads_the_adapters(tmp_path: Path) -> None:
    """PEFT's model on the plain target gives the logits of the model with the adapters."""
    save(tmp_path, *new_head(), torch.float32)
    tokens = torch.arange(7)[None]
    expected = adapted_model()(tokens).logits
    assert torch.equal(PeftModel.from_pretrained(llama(), tmp_path).eval()(tokens).logits, expected)
    assert not torch.allclose(llama()(tokens).logits, expected)
    values = json.loads((tmp_path / ADAPTER).read_text())
    assert (values["r"], values["lora_alpha"], values["layers_to_transform"]) == (2, 6, None)
    assert values["target_modules"] == sorted(MODULES) and values["base_model_name_or_path"] == "../target"


def test_inspect_shows_the_head(tmp_path: Path, capsys) -> None:
    save(tmp_path / "head", *new_head(u_embedding="arithmetic-mlp", u_hidden=3, accepted=[0.5, 0.25, 0.25, 0.0]))
    info = check_ptp(tmp_path / "head", read_config(tmp_path / "head"))
    assert info == ([0, 1, 2], 2, 6.0, sorted(MODULES), PARAMETERS)
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
    save(tmp_path / "late", *new_head(variant="late", late_width=5))
    assert main(["inspect", str(tmp_path / "head")]) == main(["inspect", str(tmp_path / "late")]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        "window 4",
        "arithmetic-mlp",
        "u features 32, u hidden 3",
        f"layers 0, 1, 2, rank 2, alpha 6, modules {', '.join(sorted(MODULES))}, parameters {PARAMETERS}",
        "0.5, 0.25, 0.25, 0",
        "weights: ok (46 tensors",
        "late width 5 distribution trust 0.85 accepted none",
    ):
        assert words in text, words


def test_head_of_the_other_method_is_refused_and_replaced_whole(folder: Path, tmp_path: Path) -> None:
    for read in (load_head, read_circuit_config, lambda place: plot_command.read(str(place))):
        with pytest.raises(CheckpointError, match=r'of method ptp; here one of method mtpc.*"method": "ptp"'):
            read(folder)
    save_circuit(folder)
    assert contents(folder).keys() == {"config.json", "model.safetensors", "README.md", "provenance.json"}
    with pytest.raises(CheckpointError, match=r'of method mtpc; here one of method ptp.*"method": "mtpc"'):
        load_ptp(folder)
    save(folder, *new_head())
    assert not (folder / "model.safetensors").exists()
    load_ptp(folder)


# ---- damaged folders ------------------------------------------------------------------------------


def rewrite(file: str, change):
    """Change tensors and keep the metadata; a new digest makes the content of adapters the only fault."""

    def edit(folder: Path) -> None:
        with safe_open(folder / file, "pt") as handle:
            metadata = handle.metadata()
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, metadata=metadata)
        update_digest(folder)

    return edit


def update_digest(folder: Path) -> None:
    with safe_open(folder / U_EMBED, "pt") as handle:
        metadata = handle.metadata()
    digest = adapter_digest({name: (folder / name).read_bytes() for name in ADAPTER_FILES})
    save_file(load_file(folder / U_EMBED), folder / U_EMBED, metadata={**metadata, ADAPTER_DIGEST: digest})


def embedding(**tensors):
    return rewrite(U_EMBED, lambda found: found.update({name.replace("__", "."): v for name, v in tensors.items()}))


def adapters(change):
    return rewrite(ADAPTER_WEIGHTS, change)


def edit_json(file: str, **changes: object):
    def edit(folder: Path) -> None:
        values = json.loads((folder / file).read_text()) | changes
        values = {key: value for key, value in values.items() if value is not ...}
        (folder / file).write_text(json.dumps(values))
        if file == ADAPTER:
            update_digest(folder)

    return edit


def rename(tensors: dict[str, torch.Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


def more_layers(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())["transformer_layer_config"]
    edit_json("config.json", transformer_layer_config={**values, "num_hidden_layers": 4})(folder)


def pickled(folder: Path) -> None:
    (folder / U_EMBED).rename(folder / "u_embed.pt")


def of_another_head(folder: Path) -> None:
    """The same shapes: only the digest differs."""
    save(folder.parent / "other", *new_head(seed=1))
    (folder / ADAPTER_WEIGHTS).write_bytes((folder.parent / "other" / ADAPTER_WEIGHTS).read_bytes())


NAN, INF = float("nan"), float("inf")
FAULTS = [
    *((lambda folder, name=name: (folder / name).unlink(), [name]) for name in (ADAPTER, ADAPTER_WEIGHTS, U_EMBED)),
    *(
        (lambda folder, name=name, content=content: (folder / name).write_bytes(content), [name])
        for name in (ADAPTER, ADAPTER_WEIGHTS, U_EMBED)
        for content in (b"", b"[]", b"\xff\xfe{}")
    ),
    (pickled, ["u_embed.pt: pickled weights are never loaded", "save_ptp"]),
    (of_another_head, [f"are not those {U_EMBED} was saved with"]),
    # the embedding
    (rewrite(U_EMBED, lambda found: found.pop("outer.bias")), [U_EMBED, "missing: outer.bias"]),
    (embedding(more=torch.zeros(2)), [U_EMBED, "unknown", "more", "outer.bias, outer.weight"]),
    (embedding(outer__bias=torch.zeros(9)), [U_EMBED, "(9,)", "(8)", "hidden_size"]),
    (embedding(outer__bias=torch.zeros(8).int()), [U_EMBED, "int32", "float16"]),
    (rewrite(U_EMBED, lambda found: found["outer.weight"][3].fill_(NAN)), [U_EMBED, "NaN", "'outer.weight'"]),
    # the adapters
    (adapters(lambda found: found.pop(Q_A)), ["missing", Q_A]),
    (adapters(lambda found: found.update({Q_A.replace("s.0", "s.3"): torch.zeros(2, 8)})), ["unknown", "layers.3"]),
    (adapters(lambda found: found.update({"lm_head.weight": torch.zeros(7, 8)})), ["unknown", "lm_head.weight"]),
    (adapters(lambda found: found.update({Q_A: torch.zeros(3, 8)})), [Q_A, "(3, 8)", "(2, 8)"]),
    (adapters(lambda found: found.update({Q_A: torch.zeros(2, 9)})), [Q_A, "(2, 9)", "(2, 8)", "hidden_size"]),
    (adapters(lambda found: found.update({DOWN_B: torch.zeros(12, 2)})), [DOWN_B, "(12, 2)", "(8, 2)"]),
    (adapters(lambda found: found[Q_A][1].fill_(INF)), ["NaN or infinity", Q_A]),
    (adapters(lambda found: found.update({Q_A: torch.zeros(2, 8).int()})), ["int32"]),
    (adapters(lambda found: rename(found, "q_proj", "qkv_proj")), ["target_modules", "qkv_proj"]),
    (adapters(lambda found: found.clear()), ["missing"]),
    (edit_json(ADAPTER, r=3), ["r = 3", "lora_rank=2"]),
    (edit_json(ADAPTER, r=0), ["'r' = 0", "greater than or equal to 1"]),
    (edit_json(ADAPTER, lora_alpha=16), ["lora_alpha = 16", "lora_alpha=6"]),
    (edit_json(ADAPTER, peft_type="IA3"), ["'IA3'", "'LORA'"]),
    (edit_json(ADAPTER, layers_to_transform=[1, 2]), ["layers_to_transform = [1, 2]", "every layer"]),
    (edit_json(ADAPTER, target_modules=["q_proj"]), ["target_modules is q_proj", "v_proj"]),
    (edit_json(ADAPTER, target_modules=[*MODULES, "lm_head"]), ["lm_head", "allowed: q_proj"]),
    (edit_json(ADAPTER, use_rslora=True), ["'use_rslora' = True"]),
    (edit_json(ADAPTER, alpha_pattern={"q_proj": 3.0}), ["alpha_pattern"]),
    # the config
    (edit_json("config.json", variant="c-ptp"), ["variant 'o-ptp'", "'c-ptp'"]),
    (edit_json("config.json", informed=False), ["unknown key 'informed'"]),
    (edit_json("config.json", u_embedding="threshold", u_features=32), ["u_embedding 'ieee'", "'threshold'"]),
    (edit_json("config.json", hidden_size=9), ["(8,", "(9", "hidden_size"]),
    (edit_json("config.json", lora_rank=3), ["r = 2", "lora_rank=3"]),
    (edit_json("config.json", circuit="cp"), ["unknown key 'circuit'", "u_embedding"]),
    (edit_json("config.json", format_version=3), ["format_version", "reads formats 1 and 2"]),
    (edit_json("config.json", accepted=[0.5, 0.5]), ["accepted has 2 entries"]),
    (edit_json("config.json", accepted=[0.5, 0.25, 0, 0]), ["sum is 0.75"]),
    (more_layers, ["layers.3."]),
]
LATE_FAULTS = [
    (rewrite(U_EMBED, lambda found: found.pop("late.token.weight")), ["missing: late.token.weight"]),
    (embedding(late__state__bias=torch.zeros(4)), [U_EMBED, "(4,)", "(3)", "late_width"]),
    (rewrite(U_EMBED, lambda found: found["late.outer.weight"][1].fill_(NAN)), ["NaN", "'late.outer.weight'"]),
    (
        edit_json("config.json", late_width=..., distribution_trust=..., variant="independent"),
        ["variant 'late'", "'independent'"],
    ),
]


@pytest.mark.parametrize(
    "is_late, damage, words",
    [*((False, *fault) for fault in FAULTS), *((True, *fault) for fault in LATE_FAULTS)],
)
def test_damaged_head_is_refused(tmp_path: Path, is_late: bool, damage, words: list[str]) -> None:
    save(tmp_path / "head", *(new_head(variant="late", late_width=3) if is_late else new_head()))
    damage(tmp_path / "head")
    text = refusal(tmp_path / "head")
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda lora, embedding: lora.pop(Q_A), ["missing", Q_A]),
        (lambda lora, embedding: lora.update({Q_A: torch.zeros(3, 8)}), ["(3, 8)"]),
        (lambda lora, embedding: lora[Q_A].fill_(1e9), ["NaN or infinity as torch.float16"]),
        (lambda lora, embedding: embedding.outer.bias.data.fill_(NAN), ["NaN", "outer.bias"]),
        (lambda lora, embedding: embedding.register_parameter("more", embedding.outer.bias), ["unknown", "more"]),
        (lambda lora, embedding: rename(lora, "q_proj", "qkv_proj"), ["qkv_proj", "allowed: q_proj"]),
    ],
)
def test_bad_weights_are_not_saved(folder: Path, change, words: list[str]) -> None:
    before = contents(folder)
    config, lora, embedding = new_head(seed=1)
    change(lora, embedding)
    with pytest.raises(CheckpointError) as caught:
        save(folder, config, lora, embedding)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert contents(folder) == before


@pytest.mark.parametrize("failing", [U_EMBED, ADAPTER_WEIGHTS, ADAPTER, "README.md", "provenance.json", "config.json"])
def test_interrupted_save_leaves_one_head_or_a_refusal(folder: Path, monkeypatch, failing: str) -> None:
    """Never the adapters of one head with the embedding of another, nor an o-ptp head labelled c-ptp."""
    old, replacement, replace = load_ptp(folder), new_head(seed=1, variant="c-ptp"), os.replace

    def failing_replace(source, target):
        if Path(target).name == failing:
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OSError, match="disk full"):
        save(folder, *replacement)
    monkeypatch.undo()
    assert not list(folder.glob("*.partial"))
    if failing != U_EMBED:
        refusal(folder)
        return
    head = load_ptp(folder)
    assert head.config == old.config and all(torch.equal(head.lora[name], old.lora[name]) for name in old.lora)


@pytest.mark.parametrize("name", ["config.json", ADAPTER, ADAPTER_WEIGHTS, U_EMBED])
def test_randomly_damaged_head_is_loaded_or_refused_in_one_line(folder: Path, name: str) -> None:
    """Damage to a JSON file or the header of a tensor file, every other one with a matching digest."""
    rng, file, loaded, rounds, whole = random.Random(0), folder / name, 0, 80, contents(folder)
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
            update_digest(folder)
        try:
            load_ptp(folder)
            loaded += 1
        except MtpcError as error:
            assert len(str(error).splitlines()) == 1
    assert loaded < rounds / 2  # the changes do damage
