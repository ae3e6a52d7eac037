"""`vllm-mtpc convert` of PTP checkpoints in both layouts of the authors keeps the weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import LlamaConfig

from tests.support.adapted import LLAMA, adapted_llama, llama
from tests.support.convert_cases import convert, refusal
from tests.support.files import front_matter_of
from vllm_mtpc.checkpoint import load_ptp
from vllm_mtpc.checkpoint.inspect import inspect_head

torch.set_num_threads(1)
# The authors' names of the tensors, by our name of the embedding.
EMBEDDINGS = {
    "ieee": {"u_adapter.weight": (8, 32), "u_adapter.bias": (8,)},
    "interpolation": {"embedding.weight": (3, 8)},
}
PREFIXES = {"official": ("model.model.", "model.u_embed."), "fork": ("student.model.", "student.u_adapter.")}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    LLAMA.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


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
    record = inspect_head(out)["provenance"]["converted"]
    assert (record["from"], record["layout"], record["epoch"]) == ("epoch=140.ckpt", layout, 140)
    assert str(tmp_path) not in (out / "provenance.json").read_text() + (out / "README.md").read_text()
    assert {"library_name", "pipeline_tag", "tags"} <= front_matter_of(out).keys()


def test_interpolation_is_matched_by_its_tensors(tmp_path, target):
    state = tensors("fork", "interpolation")
    head = load_ptp(convert(write(tmp_path, state), target))
    assert (head.config.u_embedding, head.config.u_features) == ("interpolation", 3)
    assert torch.equal(head.embedding.rows, state["student.u_adapter.embedding.weight"])


@pytest.mark.parametrize("dtype, kept", [(torch.float16, "F16"), (torch.float32, "F32"), (torch.bfloat16, "F32")])
def test_dtype_is_kept_or_widened(tmp_path, target, dtype, kept):
    state = {name: value.to(dtype) for name, value in tensors().items()}
    flags = ["--variant", "c-ptp", "--lora-alpha", 16, "--window", 4]
    out = convert(write(tmp_path, state), target, *flags)
    assert inspect_head(out)["weights"]["dtypes"] == [kept]
    head = load_ptp(out)
    assert (head.config.variant, head.config.lora_alpha, head.config.window) == ("c-ptp", 16.0, 4)
    assert torch.equal(head.embedding.outer.bias, state["model.u_embed.u_adapter.bias"].float())


def without(word: str):
    return lambda state: {name: value for name, value in state.items() if word not in name}


def plus(name: str, *shape: int, fill: float = 1.0):
    return lambda state: state | {name: torch.full(shape, fill)}


@pytest.mark.parametrize(
    "change, flags, words",
    [
        (without(".lora_"), [], ["has no adapters", "LoRA"]),
        (without("u_embed"), [], ["no u-embedding", "model.u_embed.*", "student.u_adapter.*"]),
        (plus("student.u_adapter.u_adapter.bias", 8), [], ["has 2 u-embeddings"]),
        (plus("model.u_embed.more", 8), [], ["more"]),
        (plus("model.u_embed.u_adapter.weight", 4, 32), [], ["(4, 32)", "(8, 32)"]),
        (plus("model.u_embed.u_adapter.bias", 8, fill=float("nan")), [], ["NaN"]),
        # read as `interpolation` it would give other drafts
        (
            lambda state: tensors("fork", "interpolation") | plus("student.u_adapter.embedding.weight", 32, 8)({}),
            [],
            ["`round`"],
        ),
        (
            lambda state: tensors("fork", "interpolation") | plus("student.u_adapter.embedding.weight")({}),
            [],
            ["[rows, D]"],
        ),
        (without("layers.1.mlp.up_proj.lora_B"), [], ["missing", "layers.1.mlp.up_proj.lora_B"]),
        (plus("model.model.base_model.model.model.embed_tokens.lora_embedding_A.default", 2), [], ["linear layers"]),
        (dict, ["--window", 1], ["window", "1", "2"]),
        (dict, ["--lora-alpha", 0], ["lora_alpha", "0"]),
    ],
)
def test_unsupported_checkpoint_is_refused(tmp_path, target, capsys, change, flags, words):
    text = refusal(write(tmp_path, change(tensors())), target, capsys, *flags)
    assert all(word in text for word in words), text


def test_other_target_is_refused(tmp_path, target, capsys):
    file = write(tmp_path, tensors())
    LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": 4}).save_pretrained(target)
    assert "layers.3." in refusal(file, target, capsys)
    (tmp_path / "empty").mkdir()
    assert "target" in refusal(file, tmp_path / "empty", capsys)
