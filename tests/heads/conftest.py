"""Small random targets, saved and loaded, for draft layers and PTP students."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_mtpc.hf import Target, load_target

torch.set_num_threads(1)
SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "head_dim": 8}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
SIZES |= {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def _make(folder: Path, model_type: str = "llama", **changes: object) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(SIZES | changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_target() -> Callable[..., Path]:
    """(folder, model type, changed sizes) -> the folder with a random target."""
    return _make


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a llama."""
    return _make(tmp_path_factory.mktemp("target") / "llama")


@pytest.fixture
def target(folder: Path) -> Target:
    return load_target(folder, attention="torch")
