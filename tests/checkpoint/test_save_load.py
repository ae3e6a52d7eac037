"""Heads are loaded exactly as saved, and an interrupted save leaves one head or a refusal."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from tests.checkpoint.conftest import LLAMA, adapted_llama, contents, llama, lora_of, new_mtpc, refusal, save
from vllm_mtpc.checkpoint import check_tensors, load_head, load_ptp, read_config, save_head, save_ptp
from vllm_mtpc.checkpoint.load import ADAPTER_FILES, Shards
from vllm_mtpc.circuits import CIRCUITS
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import CheckpointError, MtpcError
from vllm_mtpc.heads.adapters import MODULES
from vllm_mtpc.heads.ptp.layers import PtpHead, PtpLayers
from vllm_mtpc.heads.trunk.lora import LoraDraftLayers
from vllm_mtpc.hf import Target

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ADAPTER, ADAPTER_WEIGHTS = ADAPTER_FILES
Q_A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
# A and B, rank 2, of the seven projections of a layer
PARAMETERS = 2 * sum([8 + 8, 8 + 4, 8 + 4, 8 + 8, 8 + 12, 8 + 12, 12 + 8])
FILES = {
    "mtpc": ["model.safetensors", "README.md", "provenance.json", "config.json"],
    "layers": ["model.safetensors", ADAPTER_WEIGHTS, ADAPTER, "README.md", "provenance.json", "config.json"],
    "ptp": ["u_embed.safetensors", ADAPTER_WEIGHTS, ADAPTER, "README.md", "provenance.json", "config.json"],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("circuit", CIRCUITS)
def test_round_trip_is_bit_exact_in_the_stored_dtype(tmp_path, circuit, dtype):
    config, head = new_mtpc(circuit)
    save_head(tmp_path, config, head, {}, "card", dtype)
    expected = {name: value.to(dtype) for name, value in head.state_dict().items()}
    read_config, loaded = load_head(tmp_path, dtype)
    assert read_config == config
    for tensors in (load_file(tmp_path / "model.safetensors"), loaded.state_dict()):
        assert set(tensors) == set(expected)
        assert all(tensors[name].dtype == dtype and torch.equal(tensors[name], expected[name]) for name in expected)
    assert not loaded.training and not any(value.requires_grad for value in loaded.parameters())


LORA = {"kind": "lora", "layers": 2, "rank": 2, "alpha": 4.0}


IDS = torch.tensor([0, 2, 3, 6])


def with_vocabulary(folder: Path, edit=lambda d2t, t2d: None, **settings) -> None:
    """Save a head of four ids, after a change of its vocabulary's tensors or config."""
    config, head = new_mtpc(draft_vocab_size=4, trunk={"kind": "mlp", "width": 2})
    head.set_vocabulary(IDS)
    edit(head.d2t, head.t2d)
    save_head(folder, config.model_copy(update=settings), head, {}, "card")


def test_draft_vocabulary_is_saved_and_read(tmp_path):
    with_vocabulary(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored["d2t"] + torch.arange(4), IDS) and torch.equal(stored["t2d"].nonzero()[:, 0], IDS)
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (torch.int64, torch.bool)  # as vLLM's EAGLE-3 reads them
    config, head = load_head(tmp_path, torch.bfloat16)
    assert config.draft_vocab_size == head.columns == 4 and torch.equal(head.vocabulary.ids, IDS)
    assert head.vocabulary.columns.tolist() == [0, -1, 1, 2, -1, -1, 3]


@pytest.mark.parametrize(
    "edit, settings, words",
    [
        (lambda d2t, t2d: t2d.logical_not_(), {}, "t2d is not true exactly at the ids of d2t"),
        (lambda d2t, t2d: d2t[3:].sub_(1), {}, "t2d is not true exactly at the ids of d2t"),  # a stale d2t
        (lambda d2t, t2d: d2t[:1].add_(3), {}, "ids of d2t must rise, below vocab_size"),
        (lambda d2t, t2d: d2t[3:].add_(1), {}, "ids of d2t must rise, below vocab_size"),
        (lambda d2t, t2d: d2t[:1].sub_(1), {}, "ids of d2t must rise, below vocab_size"),
        (None, {"draft_vocab_size": 5}, r"'d2t' has shape (4,); expected: (5)"),
        (None, {"draft_vocab_size": None}, "unknown tensor(s): d2t, t2d"),
        (None, {"draft_vocab_size": 7}, "draft_vocab_size=7 with vocab_size=7"),
    ],
)
def test_damaged_draft_vocabulary_is_refused_in_one_line(tmp_path, edit, settings, words):
    with_vocabulary(tmp_path, edit or (lambda d2t, t2d: None), **settings)
    assert words in refusal(tmp_path, "mtpc")


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_missing_tensor_of_a_draft_vocabulary_is_refused(tmp_path, name):
    with_vocabulary(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    assert f"tensor(s) missing: {name}" in refusal(tmp_path, "mtpc")


def draft_layers() -> LoraDraftLayers:
    model = llama()
    split = LoraDraftLayers(Target("llama", model, None, model.model, model.lm_head, "torch"), 2, rank=2, alpha=4)
    for value in split.parameters():
        value.data.normal_()
    return split


def test_draft_layers_are_saved_and_loaded_with_their_head(tmp_path):
    split = draft_layers()
    config, head = new_mtpc(target=LLAMA, trunk=LORA)
    save_head(tmp_path / "head", config, head, {}, "card", adapters=split.adapters)
    assert load_head(tmp_path / "head")[0] == config
    loaded = LoraDraftLayers.load(check_tensors(tmp_path / "head", config), split.target)
    expected = split.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    assert json.loads((tmp_path / "head" / ADAPTER).read_text())["base_model_name_or_path"] == "../target"
    modules = sorted(MODULES)
    adapters = check_tensors(tmp_path / "head", config)
    assert (adapters.layers, adapters.rank, adapters.alpha, adapters.modules) == ([1, 2], 2, 4, modules)
    assert sum(tensor.numel() for tensor in adapters.tensors.values()) == 2 * PARAMETERS
    # a head without draft layers removes the old adapters
    save_head(tmp_path / "head", *new_mtpc(), {}, "card")
    assert not {ADAPTER, ADAPTER_WEIGHTS} & contents(tmp_path / "head").keys()
    load_head(tmp_path / "head")


@pytest.mark.parametrize("has_layers, layers", [(False, 2), (True, 1), (True, 0)])
def test_draft_layers_must_be_those_of_the_config_to_be_saved(tmp_path, has_layers, layers):
    trunk = LORA | {"layers": layers} if layers else {"kind": "none"}
    config, head = new_mtpc(target=LLAMA, trunk=trunk)
    with pytest.raises(MtpcError, match=f"lora_layers={layers}"):
        save_head(tmp_path / "head", config, head, {}, "card", adapters=draft_layers().adapters if has_layers else None)
    assert not (tmp_path / "head").exists()


PTP_SETTINGS = [{"variant": "c-ptp"}, {"variant": "late", "late_width": 3, "distribution_trust": 0.8}]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("settings", PTP_SETTINGS)
def test_ptp_head_is_loaded_as_saved(tmp_path, settings, dtype):
    settings = {"window": 4, "accepted": [0.5, 0.5, 0, 0], **settings}
    config = PtpConfig.create(target=LLAMA, verifier="../target", lora_rank=2, lora_alpha=6.0, **settings)
    lora, layers = lora_of(0, None, 6.0), PtpLayers(config)
    if layers.late is not None:
        layers.late.outer.weight.data.normal_()
    save_ptp(tmp_path, PtpHead(config, lora, layers), {}, "card", dtype)
    head = load_ptp(tmp_path)
    assert head.config == read_config(tmp_path) == config
    assert head.lora.keys() == lora.keys()
    assert all(torch.equal(value, lora[name].to(dtype).float()) for name, value in head.lora.items())
    u = torch.rand(9)
    rounded = layers.to(dtype).float()
    assert torch.equal(head.layers(u), rounded(u))
    assert not any(value.requires_grad for value in head.layers.parameters())
    if rounded.late is not None:
        states = torch.randn(2, 2, 4, 8)  # hidden, tokens
        assert torch.equal(head.layers.late(*states), rounded.late(*states))
    head = load_ptp(tmp_path, torch.bfloat16)
    assert {value.dtype for value in [*head.lora.values(), *head.layers.parameters()]} == {torch.bfloat16}


def test_peft_reads_the_adapters(tmp_path):
    """PEFT's model on the plain target gives the logits of the model with the adapters."""
    save(tmp_path, "ptp", dtype=torch.float32)
    tokens = torch.arange(7)[None]
    expected = adapted_llama(0, lora_alpha=6)(tokens).logits
    assert torch.equal(PeftModel.from_pretrained(llama(), tmp_path).eval()(tokens).logits, expected)
    assert not torch.allclose(llama()(tokens).logits, expected)
    values = json.loads((tmp_path / ADAPTER).read_text())
    assert (values["r"], values["lora_alpha"], values["layers_to_transform"]) == (2, 6, None)
    assert values["target_modules"] == sorted(MODULES) and values["base_model_name_or_path"] == "../target"


@pytest.mark.parametrize("failing", FILES["mtpc"])
@pytest.mark.parametrize("step", ["write", "fsync"])
def test_full_disk_keeps_the_old_head(folder, monkeypatch, failing, step):
    """Of other shapes: new weights under the old config would not load."""
    before, write = contents(folder), Path.write_bytes

    def full(path, data):
        if path.name == f"{failing}.partial" and step == "write":
            write(path, data[: len(data) // 2])
            no_space()
        if path.name == f"{failing}.partial":
            monkeypatch.setattr(os, "fsync", no_space)
        return write(path, data)

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        save_head(folder, *new_mtpc("hmm", seed=1), {}, "new card")
    monkeypatch.undo()
    assert contents(folder) == before
    load_head(folder)


INTERRUPTED = [("mtpc", {}, name) for name in FILES["mtpc"]] + [("mtpc", {"circuit": "hmm"}, "config.json")]
INTERRUPTED += [("layers", {}, name) for name in FILES["layers"]]
INTERRUPTED += [("ptp", {"variant": "c-ptp"}, name) for name in FILES["ptp"]]


@pytest.mark.parametrize("kind, changes, failing", INTERRUPTED)
def test_save_interrupted_between_renames_leaves_one_head_or_a_refusal(tmp_path, monkeypatch, kind, changes, failing):
    """Never tensors of two heads of the same shapes, nor an o-ptp head labelled c-ptp."""
    place, old, new = tmp_path / "head", tmp_path / "old", tmp_path / "new"
    for folder, more in ((place, {}), (old, {}), (new, {"seed": 1} | changes)):
        save(folder, kind, **more)
    replace = os.replace

    def failing_replace(source, target):
        if Path(target).name == failing:
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing_replace)
    with pytest.raises(OSError, match="disk full"):
        save(place, kind, seed=1, **changes)
    monkeypatch.undo()
    assert not list(place.glob("*.partial"))
    if (failing == ADAPTER_WEIGHTS or changes) and failing != FILES[kind][0]:
        refusal(place, kind)
        return
    expected = old if failing == FILES[kind][0] else new
    (load_ptp if kind == "ptp" else load_head)(place)
    for name in set(FILES[kind]) & {"model.safetensors", "u_embed.safetensors", ADAPTER_WEIGHTS}:
        tensors = load_file(expected / name)
        assert all(torch.equal(value, tensors[key]) for key, value in load_file(place / name).items())


@pytest.mark.parametrize(
    "kind, edit, words",
    [
        ("mtpc", lambda lora, head: head.leaves.leaf_weight.data.fill_(1e6), ["leaf_weight", "float16"]),
        ("layers", lambda lora, head: lora[Q_A].fill_(float("inf")), ["NaN or infinity", Q_A]),
        ("ptp", lambda lora, u: lora.pop(Q_A), ["missing", Q_A]),
        ("ptp", lambda lora, u: lora[Q_A].fill_(1e9), ["NaN or infinity as torch.float16"]),
        ("ptp", lambda lora, u: u.register_parameter("more", u.outer.bias), ["unknown", "more"]),
    ],
)
def test_unloadable_weights_are_not_saved(tmp_path, kind, edit, words):
    save(tmp_path, kind)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, kind, seed=1, edit=edit)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("prefixes", "found"),
    [
        (["", "model.layers.2."], ""),  # an MTP layer has a copy
        (["model.", "model.layers.2.", "model.layers.3."], "model."),
        (["model.layers.2."], "model.layers.2."),
        (["model.layers.2.", "model.layers.3."], None),
        (["model.", "visual."], None),
        (["model.other_"], None),
    ],
)
def test_tensor_is_found_by_the_end_of_its_name_outside_of_layers(tmp_path, prefixes, found):
    end = "embed_tokens.weight"
    save_file({f"{prefix}{end}": torch.zeros(1) for prefix in prefixes}, tmp_path / "model.safetensors")
    assert Shards(tmp_path).find_suffix(end) == (None if found is None else f"{found}{end}")
