"""Packed attention: each document as if it were alone; by PyTorch and by xformers, with the same numbers."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from vllm_mtpc.errors import UsageError
from vllm_mtpc.hf import attention
from vllm_mtpc.hf.attention import IMPLEMENTATIONS, check_packing, choose_attention, document_masks, packed_arguments

IMPLEMENTATION = IMPLEMENTATIONS["xformers"]
VOCAB = 31
# Rows of several documents, of one that starts at 0, of one-token documents, with and without padding (-1).
DOCUMENTS = torch.tensor(
    [
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 2, 2, 2, 2, 2, -1, -1, -1, -1, -1],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1],
    ]
)
TOKENS = torch.randint(0, VOCAB, DOCUMENTS.shape, generator=torch.Generator().manual_seed(0))
# float32 sums of a few dozen terms in another order; an attention that leaks differs by about one.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def backbone(config: type = LlamaConfig, implementation: str = "sdpa", **changes: object) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    settings = sizes | {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 64} | changes
    model = AutoModel.from_config(config(**settings), attn_implementation=implementation).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.3)  # the usual 0.02 makes attention uniform, and leaks small
    return model.requires_grad_(False)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module `xformers` with the names that are used, by dense attention over the mask it is given.

    xformers has no kernels for a CPU; this tests all that is ours: layout, groups, scale, lengths, window. Its
    `leak` injects a fault: blocks are ignored, attention is causal over everything.
    """

    class BlockDiagonalCausalMask:
        def __init__(self, lengths: list[int], window: int | None = None) -> None:
            self.lengths, self.window = lengths, window

        @classmethod
        def from_seqlens(cls, lengths: list[int], *, device: torch.device) -> BlockDiagonalCausalMask:
            return cls(lengths)

        def make_local_attention(self, window: int) -> BlockDiagonalCausalMask:
            return type(self)(self.lengths, window)

        def dense(self) -> torch.Tensor:
            block = torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths))
            i, j = torch.arange(len(block))[:, None], torch.arange(len(block))[None]
            seen = (j <= i) & ((block[:, None] == block[None]) | torch.tensor(ops.leak))
            return seen if self.window is None else seen & (j > i - self.window)

    def memory_efficient_attention(query, key, value, attn_bias, p=0.0, scale=None):  # type: ignore[no-untyped-def]
        """[1, M, H, D], or [1, M, groups, heads of a group, D]."""
        ops.calls += 1
        assert p == 0.0 and query.shape[0] == 1 and query.shape[:-1] == key.shape[:-1] == value.shape[:-1]
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = torch.einsum("bi...d,bj...d->b...ij", query, key) * scale
        weights = scores.masked_fill(~attn_bias.dense(), -torch.inf).softmax(-1)
        return torch.einsum("b...ij,bj...d->bi...d", weights, value)

    names = ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias")
    modules = {name: types.ModuleType(name) for name in names}
    ops = modules["xformers.ops"]
    ops.memory_efficient_attention, ops.calls, ops.leak = memory_efficient_attention, 0, False
    modules[names[-1]].BlockDiagonalCausalMask = BlockDiagonalCausalMask
    for name, module in modules.items():
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
        monkeypatch.setitem(sys.modules, name, module)
    AttentionInterface.register(IMPLEMENTATION, attention.xformers_attention)  # choose_attention does it, on CUDA only
    AttentionMaskInterface.register(IMPLEMENTATION, attention.deferred_mask)
    return ops


def packed(model: nn.Module, name: str) -> torch.Tensor:
    return model(input_ids=TOKENS, use_cache=False, **packed_arguments(DOCUMENTS, name)).last_hidden_state


def alone(model: nn.Module) -> torch.Tensor:
    """Return states of each document in a separate forward pass, without mask and position ids; zero at padding."""
    states = torch.zeros(*TOKENS.shape, model.config.hidden_size)
    for row, documents in enumerate(DOCUMENTS):
        for number in documents[documents >= 0].unique():
            at = documents == number
            states[row, at] = model(input_ids=TOKENS[row, at][None], use_cache=False).last_hidden_state[0]
    return states


WINDOWED = {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
MODELS = {
    "llama": (LlamaConfig, {}),
    "llama, no groups": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama, one group": (LlamaConfig, {"num_key_value_heads": 1}),
    "qwen2, some layers with a sliding window": (Qwen2Config, {**WINDOWED, "use_sliding_window": True}),
    "mistral, a sliding window": (MistralConfig, {"sliding_window": 3}),
    "gpt2": (GPT2Config, {"n_embd": 32, "n_layer": 2, "n_head": 4}),
}


@pytest.mark.parametrize("name", MODELS)
def test_torch_and_xformers_equal_each_document_alone(name: str, stand_in: types.ModuleType) -> None:
    config, changes = MODELS[name]
    reference, model = backbone(config, **changes), backbone(config, IMPLEMENTATION, **changes)
    real, expected = DOCUMENTS >= 0, alone(reference)
    for states in (packed(reference, "torch"), packed(model, "xformers")):
        assert states.isfinite().all()
        torch.testing.assert_close(states[real], expected[real], **CLOSE)
    assert stand_in.calls == model.config.num_hidden_layers  # not silently PyTorch's


def test_a_leaking_mask_is_noticed(stand_in: types.ModuleType) -> None:
    """The injected fault must exceed the tolerance of the comparison by far, and fail check_packing."""
    stand_in.leak = True
    model = backbone(implementation=IMPLEMENTATION)
    real = DOCUMENTS >= 0
    assert (packed(model, "xformers") - alone(backbone()))[real].abs().max() > 0.1
    with pytest.raises(UsageError, match="does not keep the documents"):
        check_packing(model, "xformers")
    stand_in.leak = False
    check_packing(model, "xformers")
    check_packing(backbone().bfloat16(), "torch")


def test_without_packing_the_xformers_target_generates_as_ever(stand_in: types.ModuleType) -> None:
    """A padded batch and a cache, as generation uses them, take PyTorch's attention."""
    reference, model = backbone(), backbone(implementation=IMPLEMENTATION)
    mask = torch.ones_like(TOKENS)
    mask[0, :5] = 0
    for arguments in ({}, {"attention_mask": mask}):
        expected = reference(input_ids=TOKENS, use_cache=False, **arguments).last_hidden_state
        actual = model(input_ids=TOKENS, use_cache=False, **arguments).last_hidden_state
        torch.testing.assert_close(actual[:, 5:], expected[:, 5:], **CLOSE)
    expected = reference(input_ids=TOKENS, use_cache=False).last_hidden_state
    first = model(input_ids=TOKENS[:, :7], use_cache=True)
    second = model(input_ids=TOKENS[:, 7:], use_cache=True, past_key_values=first.past_key_values)
    torch.testing.assert_close(second.last_hidden_state, expected[:, 7:], **CLOSE)
    assert stand_in.calls == 0


def test_without_a_kernel_pytorch_computes_the_same(
    stand_in: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kernel(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("No operator found for `memory_efficient_attention_forward`")

    monkeypatch.setattr(stand_in, "memory_efficient_attention", no_kernel)
    real = DOCUMENTS >= 0
    with pytest.warns(UserWarning, match="xformers has no kernel for torch.float32"):
        states = packed(backbone(implementation=IMPLEMENTATION), "xformers")
    torch.testing.assert_close(states[real], packed(backbone(), "torch")[real], **CLOSE)


def test_soft_caps_and_sinks_do_not_reach_xformers(stand_in: types.ModuleType) -> None:
    x = torch.randn(1, 2, 5, 8)
    packing = document_masks([2, 3], torch.device("cpu"))
    for special in ({"softcap": 5.0}, {"s_aux": torch.zeros(2)}):
        attention.xformers_attention(nn.Module(), x, x, x, None, packing=packing, **special)
    assert stand_in.calls == 0


def test_attention_is_chosen_by_name_and_device(stand_in: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_attention("torch", "cpu") == choose_attention("auto", "cpu") == "torch"
    with pytest.raises(UsageError, match=r"the device is cpu.*--attention torch"):
        choose_attention("xformers", "cpu")
    monkeypatch.setattr(torch, "zeros", _fail)  # kernels that do not run on the device
    assert choose_attention("auto", "cuda") == "torch"
    with pytest.raises(UsageError, match=r"it fails on cuda \(no kernel image is available\)"):
        choose_attention("xformers", "cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"not installed; type: pip install '\.\[train-cuda\]'"):
        choose_attention("xformers", "cuda")


def _fail(*args: object, **kwargs: object) -> None:
    raise RuntimeError("no kernel image is available\nCUDA kernel errors might be reported later")
