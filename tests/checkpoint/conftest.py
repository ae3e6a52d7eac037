"""Small heads of every kind on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_mtpc.checkpoint import check_tensors, load_head, load_ptp, read_config, save_head, save_ptp
from vllm_mtpc.cli import main
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.heads.adapters import MODULES, Adapters
from vllm_mtpc.heads.head import Head, build_head
from vllm_mtpc.heads.ptp.layers import PtpHead, PtpLayers

torch.set_num_threads(1)
TARGET = {"model_type": "llama", "hidden_size": 4, "vocab_size": 7, "architectures": ["LlamaForCausalLM"]}
KINDS = ("mtpc", "layers", "ptp", "late")
SIZES = dict(vocab_size=7, hidden_size=8, intermediate_size=12, num_hidden_layers=3)
LLAMA = LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=1, head_dim=4)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LLAMA).eval().requires_grad_(False)


def adapted_llama(seed: int = 0, layers: list[int] | None = None, **lora: float) -> PeftModel:
    """PEFT's model of `llama` with random adapters of rank 2 on some layers or all."""
    config = LoraConfig(r=2, target_modules=list(MODULES), layers_to_transform=layers, **lora)
    model = get_peft_model(llama(), config).eval()
    torch.manual_seed(seed)
    for name, value in model.named_parameters():
        if ".lora_" in name:
            value.data.normal_()
    return model


def new_mtpc(circuit: str = "btree", seed: int = 0, **settings: Any) -> tuple[HeadConfig, Head]:
    """Return the config and the untrained head of a circuit."""
    settings = {"window": 4, "num_components": 1 if circuit == "ff" else 2, "verifier": "../target"} | settings
    config = HeadConfig.create(circuit=circuit, **({"target": TARGET} | settings))
    torch.manual_seed(seed)
    return config, build_head(config)


@pytest.fixture
def target(tmp_path) -> Path:
    """The folder of LLAMA's config."""
    LLAMA.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A saved btree head."""
    save(tmp_path / "head", "mtpc")
    return tmp_path / "head"


def lora_of(seed: int, layers: list[int] | None, alpha: float) -> dict[str, Tensor]:
    return get_peft_model_state_dict(adapted_llama(seed, layers, lora_alpha=alpha))


def save(folder: Path, kind: str, seed: int = 0, edit: Any = None, dtype=torch.float16, **settings: Any) -> None:
    """Save a head of KINDS: MtPC, MtPC with draft layers, PTP, PTP with a late network; `edit` changes its tensors."""
    end = {"command": "train me"}, "# a head\n", dtype
    if kind in ("mtpc", "layers"):
        more = (
            {"target": LLAMA, "trunk": {"kind": "lora", "layers": 2, "rank": 2, "alpha": 6.0}}
            if kind == "layers"
            else {}
        )
        config, head = new_mtpc(settings.pop("circuit", "btree"), seed, **more | settings)
        lora = lora_of(seed, [1, 2], 6.0) if kind == "layers" else {}
        if edit:
            edit(lora, head)
        save_head(folder, config, head, *end, Adapters([1, 2], 2, 6.0, list(MODULES), lora) if lora else None)
        return
    settings = {"variant": "late" if kind == "late" else "o-ptp", "window": 4, "lora_rank": 2} | settings
    config = PtpConfig.create(target=LLAMA, verifier="../target", lora_alpha=6.0, **settings)
    torch.manual_seed(seed)
    head = PtpHead(config, lora_of(seed, None, 6.0), PtpLayers(config))
    if edit:
        edit(head.lora, head.layers)
    save_ptp(folder, head, *end)


def refusal(folder: Path, kind: str) -> str:
    """The one line of all readers."""
    load = load_ptp if kind in ("ptp", "late") else load_head
    lines = []
    for read in (load, lambda place: check_tensors(place, read_config(place))):
        with pytest.raises(MtpcError) as caught:
            read(folder)
        lines.append(str(caught.value))
    assert len(set(lines)) == 1 and str(folder) in lines[0]
    assert len(lines[0]) < 500 and lines[0].isprintable(), lines[0]  # one line
    return lines[0]


def converted_from(folder: Path) -> dict[str, Any]:
    """What a head's provenance records of its conversion."""
    return json.loads((folder / "provenance.json").read_text())["converted"]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def convert(file: Path | str, target: Path, *flags: Any, out: Path | None = None) -> Path:
    """The head that `vllm-mtpc convert` writes, by default next to the target."""
    out = out or target.parent / "head"
    assert main(["convert", str(file), "--target", str(target), "--out", str(out), *map(str, flags)]) == 0
    return out


def convert_refusal(file: Path | str, target: Path, capsys: pytest.CaptureFixture[str], *flags: Any) -> str:
    """The one line of the error; nothing is written."""
    out = target.parent / "refused"
    capsys.readouterr()
    assert main(["convert", str(file), "--target", str(target), "--out", str(out), *map(str, flags)]) == 1
    text = capsys.readouterr().err
    assert text.startswith("vllm-mtpc: error: ") and text.count("\n") == 1, text
    assert not out.exists()
    return text
