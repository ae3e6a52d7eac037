"""Draft layers: the target is unchanged bit for bit, drafts start at its states, gradients reach the adapters alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.adapters import DraftLayers
from vllm_mtpc.hf import Target, load_target

torch.set_num_threads(1)
V, LAYERS = 32, 5
TOKENS = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(0))
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 4 + [1] * 6 + [-1] * 2])


def move(split: DraftLayers, seed: int = 1, std: float = 0.2) -> None:
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
    split = DraftLayers(target, layers)
    trunk = split.trunk(TOKENS, documents)
    assert torch.equal(split.verifier(trunk, documents), before)
    assert torch.equal(split.draft(trunk, documents), before)  # B is zero
    move(split)
    assert not torch.allclose(split.draft(trunk, documents), before, atol=0.05)
    assert torch.equal(split.verifier(trunk, documents), before)
    assert torch.equal(target.hidden(TOKENS, documents), before)
    assert list(target.model.state_dict()) == names
    assert not any(value.requires_grad for value in target.model.parameters())


def test_trunk_is_the_input_of_the_first_draft_layer(target: Target) -> None:
    seen = []
    hook = target.backbone.layers[LAYERS - 2].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    target.hidden(TOKENS, DOCUMENTS)
    hook.remove()
    trunk = DraftLayers(target, 2).trunk(TOKENS, DOCUMENTS)
    assert torch.equal(trunk, seen[0])
    assert not trunk.requires_grad


def test_gradients_reach_every_adapter_and_nothing_else(target: Target) -> None:
    split = DraftLayers(target, 2, rank=3)
    move(split)
    trunk = split.trunk(TOKENS, DOCUMENTS)
    states = split.draft(trunk, DOCUMENTS)
    split.verifier(trunk, DOCUMENTS)  # between forward and backward, as in training
    states.pow(2).sum().backward()
    parameters = dict(split.named_parameters())
    assert len(parameters) == 2 * 7 * 2  # layers, projections, A and B
    assert {min(value.shape) for value in parameters.values()} == {3}
    for name, value in parameters.items():
        assert value.grad is not None and value.grad.abs().sum() > 0, name
    assert all(value.grad is None for value in target.model.parameters())


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one-document", "packed"])
def test_update_is_alpha_by_rank_times_b_a_on_the_last_layers(target: Target, folder: Path, documents) -> None:
    """Against a target whose weights were changed directly."""
    split = DraftLayers(target, 2, rank=4, alpha=8)
    move(split)
    other = load_target(folder, attention="torch")
    tensors = split.state_dict()
    for index in (LAYERS - 2, LAYERS - 1):
        for block, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down"))):
            for name in names:
                place = f"layers/{index}/{block}/{name}_proj/lora_{{}}/default/weight"
                a, b = (tensors[f"_weights.{place.format(part)}"] for part in "AB")
                linear = getattr(getattr(other.backbone.layers[index], block), f"{name}_proj")
                linear.weight.data += 8 / 4 * b @ a
    expected = other.hidden(TOKENS, documents)
    given = split.draft(split.trunk(TOKENS, documents), documents)
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)  # two products added, or one: rounding


def test_saved_adapters_load_in_peft(target: Target, folder: Path, tmp_path: Path) -> None:
    split = DraftLayers(target, 2, rank=4, alpha=8)
    move(split)
    for name, data in split.adapters.files(str(folder)).items():
        (tmp_path / name).write_bytes(data)
    model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(folder), tmp_path).eval()
    with torch.no_grad():
        expected = model.base_model.model.model(TOKENS).last_hidden_state
    torch.testing.assert_close(split.draft(split.trunk(TOKENS)), expected, rtol=1e-5, atol=1e-5)
    loaded = DraftLayers.load(split.adapters, target)
    assert torch.equal(loaded.draft(split.trunk(TOKENS)), split.draft(split.trunk(TOKENS)))
    assert (loaded.num_layers, loaded.adapters.rank, loaded.adapters.alpha) == (2, 4, 8)


def test_adapters_of_a_bfloat16_target_are_float32(folder: Path) -> None:
    target = load_target(folder, dtype=torch.bfloat16, attention="torch")
    split = DraftLayers(target, 2)
    move(split)
    trunk = split.trunk(TOKENS, DOCUMENTS)
    states = split.draft(trunk, DOCUMENTS)
    assert trunk.dtype == states.dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in split.parameters())
    states.float().sum().backward()
    assert all(value.grad.dtype == torch.float32 for value in split.parameters())
    assert torch.equal(split.verifier(trunk, DOCUMENTS), target.hidden(TOKENS, DOCUMENTS))


@pytest.mark.parametrize(
    "sizes, arguments, words",
    [
        ({"num_hidden_layers": 2}, {"layers": 2}, ["2 layers", "lower lora_layers"]),
        ({"model_type": "gpt2", "n_layer": 3}, {"layers": 1}, ["GPT2Model", "lora_layers to 0"]),
    ],
)
def test_impossible_layers_are_refused(tmp_path: Path, make_target, sizes: dict, arguments: dict, words: list) -> None:
    sizes = sizes | ({"n_embd": 32, "n_head": 4} if "model_type" in sizes else {})
    target = load_target(make_target(tmp_path, **sizes), attention="torch")
    with pytest.raises(HeadConfigError) as caught:
        DraftLayers(target, **arguments)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value), str(caught.value)


def test_adapters_of_another_target_are_refused(target: Target, tmp_path: Path, make_target) -> None:
    adapters = DraftLayers(target, 2).adapters
    other = load_target(make_target(tmp_path / "other", intermediate_size=64), attention="torch")
    with pytest.raises(HeadConfigError, match="name the target the head was trained for"):
        DraftLayers.load(adapters, other)
