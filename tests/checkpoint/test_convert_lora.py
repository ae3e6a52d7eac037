"""Adapters of MtPC checkpoints: a model of PEFT, saved in the authors' layout, gives draft layers of its states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import authors_mtpc as authors
from vllm_mtpc.checkpoint import check_tensors, load_head
from vllm_mtpc.checkpoint.inspect import inspect_head
from vllm_mtpc.cli import main
from vllm_mtpc.heads.adapters import DraftLayers
from vllm_mtpc.hf import Target

torch.set_num_threads(1)
V, D = 7, 8
LLAMA = LlamaConfig(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=12,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)
MODULES = ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"]
ADAPTOR = """\
adaptor:
  name: lora-last-2
  hyperparameters:
    r: 2
    lora_alpha: {alpha}
    lora_dropout: 0.0
    target_modules: [gate_proj, down_proj, up_proj, q_proj, v_proj, k_proj, o_proj]
    layers_to_transform: ${{lm.last_{layers}_layers}}"""


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA).eval().requires_grad_(False)


def adapted(layers: list[int], alpha: int = 6, seed: int = 1):
    lora = LoraConfig(r=2, lora_alpha=alpha, target_modules=MODULES, layers_to_transform=layers)
    model = get_peft_model(llama(), lora).eval()
    torch.manual_seed(seed)
    for name, value in model.named_parameters():
        if ".lora_" in name:
            value.data.normal_()
    return model


def checkpoint(folder: Path, model, layers: int, change=None, alpha: int = 6) -> Path:
    """The head with the model's adapters; as the authors' code does, None for weights that were not trained."""
    state = authors.state_dict("btree", 4, 3, V, D)
    state |= {f"lm._lm.{name}": value if ".lora_" in name else None for name, value in model.state_dict().items()}
    state = state if change is None else change(state)
    adaptor = ADAPTOR.format(layers=layers, alpha=alpha)
    return authors.save(folder / "run", state, "btree", 4, 3, V, D, adaptor=adaptor)


def convert(tmp_path: Path, file: Path, config: LlamaConfig = LLAMA) -> tuple[int, Path]:
    config.save_pretrained(tmp_path / "target")
    out = tmp_path / "head"
    return main(["convert", str(file), "--target", str(tmp_path / "target"), "--out", str(out)]), out


@pytest.mark.parametrize("layers", [[2], [1, 2]])
def test_draft_layers_give_the_states_of_the_adapted_model(tmp_path, layers):
    model = adapted(layers)
    code, out = convert(tmp_path, checkpoint(tmp_path, model, len(layers)))
    config, _ = load_head(out)
    check_tensors(out, config)
    assert (code, config.lora_layers) == (0, len(layers))
    plain = llama()
    target = Target("llama", plain, None, plain.model, plain.lm_head, "torch")
    draft = DraftLayers.load(out, target)
    tokens = torch.arange(V)[None]
    with torch.no_grad():
        expected = model(tokens, output_hidden_states=True).hidden_states[-1]
        states = draft(draft.trunk(tokens))
        assert torch.allclose(states, expected, atol=1e-5)  # float32; the same products, in PEFT's or our views
        assert not torch.allclose(plain(tokens, output_hidden_states=True).hidden_states[-1], expected, atol=0.1)
    assert inspect_head(out)["adapters"]["layers"] == layers
    values = json.loads((out / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["layers_to_transform"]) == (2, 6, layers)
    assert values["base_model_name_or_path"] == "../target"


def renamed(old: str, new: str):
    return lambda state: {name.replace(old, new): value for name, value in state.items()}


def without(word: str):
    return lambda state: {name: value for name, value in state.items() if word not in name}


def cut(word: str):
    return lambda state: {name: value[:1] if word in name else value for name, value in state.items()}


@pytest.mark.parametrize(
    "layers, change, words",
    [
        ([1], None, ["adapters on layers [1] of 3", "the last 1, 2, 4 layers"]),
        ([0, 1, 2], None, ["layers [0, 1, 2] of 3"]),
        ([1, 2], without("layers.2.mlp.up_proj.lora_B"), ["missing", "layers.2.mlp.up_proj.lora_B"]),
        ([1, 2], renamed("lora_A.default.weight", "lora_magnitude_vector.default"), ["lora_magnitude_vector"]),
        ([1, 2], renamed("q_proj.lora_", "rotary.lora_"), ["rotary.lora_", "q_proj"]),
        ([1, 2], renamed("default.weight", "other.weight"), ["other.weight"]),
        ([1, 2], without(".lora_"), ["0 adapter tensors", "r = 2"]),
        (
            [1, 2],
            lambda state: {n: v[:1] if v is not None and ".lora_A" in n else v for n, v in state.items()},
            ["ask for (2, "],
        ),
        (
            [1, 2],
            lambda state: state | {"lm._lm.base_model.model.lm_head.modules_to_save.default.weight": torch.ones(V, D)},
            ["modules_to_save"],
        ),
    ],
)
def test_adapters_that_are_not_of_the_last_layers_are_refused(tmp_path, capsys, layers, change, words):
    code, out = convert(tmp_path, checkpoint(tmp_path, adapted(layers), 2, change))
    text = capsys.readouterr().err
    assert code == 1 and not out.exists()
    assert text.startswith("vllm-mtpc: error: ") and text.count("\n") == 1
    assert all(word in text for word in words), text


def test_adapters_need_the_target_they_were_trained_on(tmp_path, capsys):
    deeper = LlamaConfig(**{**LLAMA.to_dict(), "num_hidden_layers": 4})
    assert convert(tmp_path, checkpoint(tmp_path, adapted([1, 2]), 2), deeper)[0] == 1
    assert "layers [1, 2] of 4" in capsys.readouterr().err


def test_adapters_are_those_of_the_config(tmp_path, capsys):
    file = checkpoint(tmp_path, adapted([1, 2]), 2)
    config = file.with_name("config.yaml")
    config.write_text(config.read_text().replace("lora_dropout: 0.0", "use_rslora: true"))
    assert convert(tmp_path, file)[0] == 1
    assert "unknown use_rslora" in capsys.readouterr().err
    file = checkpoint(tmp_path, adapted([1, 2]), 1)
    assert convert(tmp_path, file)[0] == 1
    assert "config.yaml says [2]" in capsys.readouterr().err
