"""Small heads on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_mtpc.checkpoint import save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.linear import LinearHead

torch.set_num_threads(1)
TARGET = {"model_type": "llama", "hidden_size": 4, "vocab_size": 7, "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def new_head():
    """(config, untrained head) of a circuit."""

    def build(circuit: str = "btree", seed: int = 0, **settings) -> tuple[HeadConfig, LinearHead]:
        settings = {"window": 4, "num_components": 1 if circuit == "ff" else 2, "verifier": "../target"} | settings
        config = HeadConfig.create(circuit=circuit, target=TARGET, **settings)
        torch.manual_seed(seed)
        return config, build_head(config)

    return build


@pytest.fixture
def folder(tmp_path, new_head) -> Path:
    """A saved btree head."""
    save_head(tmp_path / "head", *new_head(), {"command": "train me"}, "# a head\n")
    return tmp_path / "head"
