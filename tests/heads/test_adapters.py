"""Draft layers: the target is unchanged bit for bit, drafts start at its states, gradients reach the adapters alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from vllm_mtpc.heads.trunk.lora import LoraDraftLayers
from vllm_mtpc.hf import Target, load_target

torch.set_num_threads(1)
V, LAYERS = 32, 5
TOKENS = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(0))
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 4 + [1] * 6 + [-1] * 2])


def move(split: LoraDraftLayers, seed: int = 1, std: float = 0.2) -> None:
    """Adapters as training would leave them: not zero."""
    generator = torch.Generator().manual_seed(seed)
    for value in split.parameters():
        value.data.copy_(torch.randn(value.shape, generator=generator) * std)


TYPES = ("qwen2", "qwen3", "mistral", "gemma", "gemma3_text", "olmo2", "granite")
STARTS = [("llama", layers, documents) for layers in (1, 2, 4) for documents in (None, DOCUMENTS)]


@pytest.mark.parametrize("model_type, layers, documents", [*STARTS, *((name, 2, DOCUMENTS) for name in TYPES)])
def test_target_is_unchanged_and_drafts_start_at_its_states(
    tmp_path: Path, make_target, model_type: str, layers: int, documents
) -> None:
    """Also with scaled embeddings (Gemma, Granite), layers with other masks (Gemma 3) and other norms."""
    target = load_target(make_target(tmp_path / model_type, model_type), attention="torch")
    names, before = list(target.model.state_dict()), target.hidden(TOKENS, documents)
    torch.manual_seed(0)
    split = LoraDraftLayers(target, layers)
    trunk = split.trunk(TOKENS, documents)
    assert torch.equal(split.plain(trunk, documents), before)
    assert torch.equal(split.draft(trunk, documents), before)  # B is zero
    move(split)
    assert not torch.allclose(split.draft(trunk, documents), before, atol=0.05)
    assert torch.equal(split.plain(trunk, documents), before)
    assert torch.equal(target.hidden(TOKENS, documents), before)
    assert list(target.model.state_dict()) == names
    assert not any(value.requires_grad for value in target.model.parameters())


def test_gradients_reach_every_adapter_and_nothing_else(target: Target) -> None:
    split = LoraDraftLayers(target, 2, rank=3)
    move(split)
    trunk = split.trunk(TOKENS, DOCUMENTS)
    states = split.draft(trunk, DOCUMENTS)
    split.plain(trunk, DOCUMENTS)  # between forward and backward, as in training
    states.pow(2).sum().backward()
    parameters = dict(split.named_parameters())
    assert len(parameters) == 2 * 7 * 2  # layers, projections, A and B
    assert {min(value.shape) for value in parameters.values()} == {3}
    for name, value in parameters.items():
        assert value.grad is not None and value.grad.abs().sum() > 0, name
    assert all(value.grad is None for value in target.model.parameters())


def test_saved_adapters_load_in_peft(target: Target, folder: Path, tmp_path: Path) -> None:
    split = LoraDraftLayers(target, 2, rank=4, alpha=8)
    move(split)
    for name, data in split.adapters.files(str(folder)).items():
        (tmp_path / name).write_bytes(data)
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folder), tmp_path).eval()
    with torch.no_grad():
        expected = model.base_model.model.model(TOKENS).last_hidden_state
    torch.testing.assert_close(split.draft(split.trunk(TOKENS)), expected, rtol=1e-5, atol=1e-5)
    loaded = LoraDraftLayers.load(split.adapters, target)
    assert torch.equal(loaded.draft(split.trunk(TOKENS)), split.draft(split.trunk(TOKENS)))
    assert (loaded.adapters.num_layers, loaded.adapters.rank, loaded.adapters.alpha) == (2, 4, 8)


def test_adapters_of_a_bfloat16_target_are_float32(folder: Path) -> None:
    target = load_target(folder, dtype=torch.bfloat16, attention="torch")
    split = LoraDraftLayers(target, 2)
    move(split)
    trunk = split.trunk(TOKENS, DOCUMENTS)
    states = split.draft(trunk, DOCUMENTS)
    assert trunk.dtype == states.dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in split.parameters())
    states.float().sum().backward()
    assert all(value.grad.dtype == torch.float32 for value in split.parameters())
    assert torch.equal(split.plain(trunk, DOCUMENTS), target.hidden(TOKENS, DOCUMENTS))
