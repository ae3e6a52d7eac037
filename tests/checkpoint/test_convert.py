"""`vllm-mtpc convert` keeps the weights of PTP checkpoints, finds files, folders and hub names, and runs no pickles."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.hf_api import ModelInfo
from peft import PeftModel
from transformers import LlamaConfig

from tests.checkpoint.conftest import LLAMA, adapted_llama, convert, convert_refusal, converted_from, dtypes_of, llama
from tests.support import authors_mtpc as authors
from tests.support import drafters
from tests.support.files import front_matter_of
from tests.support.models import make_target
from vllm_mtpc.checkpoint import load_ptp
from vllm_mtpc.cli import main

torch.set_num_threads(1)
# The authors' names of the tensors, by our name of the embedding.
EMBEDDINGS = {
    "ieee": {"u_adapter.weight": (8, 32), "u_adapter.bias": (8,)},
    "interpolation": {"embedding.weight": (3, 8)},
}
PREFIXES = {"official": ("model.model.", "model.u_embed."), "fork": ("student.model.", "student.u_adapter.")}


def tensors(layout: str = "official", embedding: str = "ieee", full: bool = False) -> dict[str, torch.Tensor]:
    """The state_dict of a checkpoint, with the target's weights (full) or without."""
    model, u_embed = PREFIXES[layout]
    student = adapted_llama(1).state_dict()
    state = {f"{model}{name}": value for name, value in student.items() if full or ".lora_" in name}
    torch.manual_seed(2)
    state |= {f"{u_embed}{name}": torch.randn(shape) for name, shape in EMBEDDINGS[embedding].items()}
    if layout == "fork":
        state |= {f"teacher.model.{name}": value for name, value in llama().state_dict().items()}
    return state


def write(folder: Path, state: dict) -> Path:
    content = {"state_dict": state, "epoch": 140, "global_step": 9, "hyper_parameters": {"lr": 1e-4}}
    torch.save(content, folder / "epoch=140.ckpt")
    return folder / "epoch=140.ckpt"


@pytest.mark.parametrize("layout, full", [("official", True), ("fork", True), ("fork", False)])
def test_adapters_and_embedding_of_both_layouts(tmp_path, target, capsys, layout, full):
    """The converted adapters on the plain target give the logits of the model the checkpoint was made of."""
    state = tensors(layout, full=full)
    out = convert(write(tmp_path, state), target, "--temperature", 0.7, "--top-k", 50)
    assert str(out) in capsys.readouterr().out
    config, lora, embedding, late = load_ptp(out)
    assert (config.variant, config.window, config.u_embedding) == ("o-ptp", 16, "ieee")
    assert (config.num_speculative_tokens, config.lora_rank, config.lora_alpha, config.accepted) == (15, 2, 8.0, None)
    assert (config.trained_temperature, config.trained_top_k, config.trained_top_p) == (0.7, 50, 1.0)
    assert config.speculators_config.verifier.name_or_path == "../target"
    assert len(lora) == 3 * 7 * 2 and late is None
    prefix = PREFIXES[layout][1]
    assert torch.equal(embedding.outer.weight, state[f"{prefix}u_adapter.weight"])
    assert torch.equal(embedding.outer.bias, state[f"{prefix}u_adapter.bias"])
    tokens = torch.arange(7)[None]
    expected = adapted_llama(1)(tokens).logits  # alpha is PEFT's default, as the authors leave it
    assert torch.equal(PeftModel.from_pretrained(llama(), out).eval()(tokens).logits, expected)
    assert not torch.allclose(llama()(tokens).logits, expected)
    record = converted_from(out)
    assert (record["from"], record["layout"], record["epoch"]) == ("epoch=140.ckpt", layout, 140)
    assert str(tmp_path) not in (out / "provenance.json").read_text() + (out / "README.md").read_text()
    assert {"library_name", "pipeline_tag", "tags"} <= front_matter_of(out).keys()


def test_interpolation_is_matched_by_its_tensors(tmp_path, target):
    state = tensors("fork", "interpolation")
    head = load_ptp(convert(write(tmp_path, state), target))
    assert (head.config.u_embedding, head.config.u_features) == ("interpolation", 3)
    assert torch.equal(head.embedding.rows, state["student.u_adapter.embedding.weight"])


@pytest.mark.parametrize(
    "dtype, kept", [(torch.float16, torch.float16), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)]
)
def test_dtype_is_kept_or_widened(tmp_path, target, dtype, kept):
    state = {name: value.to(dtype) for name, value in tensors().items()}
    flags = ["--variant", "c-ptp", "--lora-alpha", 16, "--window", 4]
    out = convert(write(tmp_path, state), target, *flags)
    assert dtypes_of(out) == {kept}
    head = load_ptp(out)
    assert (head.config.variant, head.config.lora_alpha, head.config.window) == ("c-ptp", 16.0, 4)
    assert torch.equal(head.embedding.outer.bias, state["model.u_embed.u_adapter.bias"].float())


def without(word: str):
    return lambda state: {name: value for name, value in state.items() if word not in name}


def rows(*shape: int):
    return lambda state: tensors("fork", "interpolation") | {"student.u_adapter.embedding.weight": torch.ones(shape)}


def plus(name: str, *shape: int):
    return lambda state: state | {name: torch.ones(shape)}


@pytest.mark.parametrize(
    "change, flags, words",
    [
        (without(".lora_"), [], ["has no adapters", "LoRA"]),
        (without("u_embed"), [], ["no u-embedding", "model.u_embed.*", "student.u_adapter.*"]),
        (plus("student.u_adapter.u_adapter.bias", 8), [], ["has 2 u-embeddings"]),
        (plus("model.u_embed.more", 8), [], ["more"]),
        (plus("model.u_embed.u_adapter.weight", 4, 32), [], ["(4, 32)", "(8, 32)"]),
        (rows(32, 8), [], ["`round`"]),  # read as `interpolation` it would give other drafts
        (rows(), [], ["[rows, D]"]),
        (without("layers.1.mlp.up_proj.lora_B"), [], ["missing", "layers.1.mlp.up_proj.lora_B"]),
        (plus("model.model.base_model.model.model.embed_tokens.lora_embedding_A.default", 2), [], ["linear layers"]),
        (dict, ["--window", 1], ["window", "1", "2"]),
    ],
)
def test_unsupported_checkpoint_is_refused(tmp_path, target, capsys, change, flags, words):
    text = convert_refusal(write(tmp_path, change(tensors())), target, capsys, *flags)
    assert all(word in text for word in words), text


def test_other_target_is_refused(tmp_path, target, capsys):
    file = write(tmp_path, tensors())
    LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": 4}).save_pretrained(target)
    assert "layers.3." in convert_refusal(file, target, capsys)
    (tmp_path / "empty").mkdir()
    assert "target" in convert_refusal(file, tmp_path / "empty", capsys)


# ---- finding checkpoints ---------------------------------------------------------------------------


def mtpc_checkpoint(folder: Path) -> Path:
    return authors.save(folder / "run", authors.state_dict("cp", 3, 2, 7, 8), "cp", 3, 2, 7, 8)


@pytest.mark.parametrize("kind", ["mtpc", "drafter"])
def test_hub_name_is_downloaded_at_one_commit(tmp_path, target, capsys, monkeypatch, kind):
    folder, names = mtpc_checkpoint(tmp_path).parent, ["config.yaml", "model@100.pt", "model@900.pt"]
    files, file = ["model@900.pt", "config.yaml"], "/model@900.pt"
    if kind == "drafter":
        folder = drafters.make(tmp_path / "drafter", "speculators dflash", make_target(target, 48, 0, layers=4))
        names, file = ["config.json", "model@x.bin"], ""
        files = ["config.json", "*.safetensors", "*.safetensors.index.json"]
    asked: list[Any] = []

    def download(repo: str, revision: str, allow_patterns: list[str]) -> str:
        asked.append((repo, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    text = convert_refusal("someone/a-head", target, capsys)
    assert "someone/a-head: not a local file or folder, and cannot be downloaded" in text
    info = ModelInfo(id="someone/a-head", sha="c0ffee", siblings=[{"rfilename": name} for name in names])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repo: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    out = convert("someone/a-head", target)
    assert asked == [("someone/a-head", "c0ffee", files)]
    assert converted_from(out)["from"] == f"someone/a-head@c0ffee{file}"


def test_missing_files_other_folders_and_foreign_flags_are_refused(tmp_path, target, capsys):
    file, before = mtpc_checkpoint(tmp_path), (target / "config.json").read_bytes()
    text = convert_refusal(file, target, capsys, "--variant", "c-ptp", "--window", 4)
    assert "--variant, --window: for PTP checkpoints only" in text
    assert "model.safetensors" in convert_refusal(target, target, capsys)  # a model without weights
    other = shutil.copytree(target, tmp_path / "other")
    assert "architectures" in convert_refusal(other, target, capsys)  # a model, but no drafter
    assert main(["convert", str(file), "--target", str(target), "--out", str(target)]) == 1
    assert "another model's config.json" in capsys.readouterr().err
    assert (target / "config.json").read_bytes() == before
    file.unlink()
    assert "has no model@STEP.pt and no config.json" in convert_refusal(file.parent, target, capsys)
    assert "is not a file" in convert_refusal(file, target, capsys)


class Planted:
    """Leaves a file if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "a.ckpt"),
        (b"not a checkpoint", "a.ckpt"),
        (b"PK\x03\x04", "a.ckpt"),
        ([], "'state_dict'"),
        ({"weights": {}}, "'state_dict'"),
        ({"state_dict": 3}, "'state_dict'"),
        ({"state_dict": {}, "model_state_dict": {}}, "'state_dict' and 'model_state_dict'"),
        ({"state_dict": {}, "callbacks": Planted}, "tensors alone"),
        ({"model_state_dict": {"mt_head.planted": Planted}}, "tensors alone"),
    ],
)
def test_other_file_is_refused_and_never_unpickled(tmp_path, target, capsys, content, words):
    file, ran = tmp_path / "a.ckpt", tmp_path / "ran"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save({"planted": Planted(ran), "content": content} if words == "tensors alone" else content, file)
    assert words in convert_refusal(file, target, capsys)
    assert not ran.exists()
    if words == "tensors alone":
        torch.load(file, weights_only=False)
        assert ran.exists()  # the control
