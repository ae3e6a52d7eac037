"""Adapters on sharded layers: the parts of all ranks together are the adapter on disk."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear

from tests.support.operations import Operations
from vllm_mtpc.proposers.v2.lora import Gate, GatedLinear, adapt_linear

HIDDEN, INNER, HEAD, HEADS, KV_HEADS, RANK = 16, 24, 4, 4, 2, 3
OUTPUTS = {
    "qkv_proj": {"q_proj": HEADS * HEAD, "k_proj": KV_HEADS * HEAD, "v_proj": KV_HEADS * HEAD},
    "gate_up_proj": {"gate_proj": INNER, "up_proj": INNER},
    "down_proj": {"down_proj": HIDDEN},
}


def make(name: str) -> linear.LinearBase:
    if name == "qkv_proj":
        return linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, bias=False)
    if name == "gate_up_proj":
        return linear.MergedColumnParallelLinear(HIDDEN, [INNER, INNER], bias=False)
    return linear.RowParallelLinear(INNER, HIDDEN, bias=False)


def stored(name: str) -> dict[str, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs = INNER if name == "down_proj" else HIDDEN
    return {
        part: (torch.randn(RANK, inputs, generator=generator), torch.randn(outputs, RANK, generator=generator))
        for part, outputs in OUTPUTS[name].items()
    }


def shards(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> list[GatedLinear]:
    """The layer on each of `size` ranks."""
    made = []
    for rank in range(size):
        for module in (linear, parameter):
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        lora = {
            f"base_model.model.layer.{part}.lora_{letter}.weight": matrix
            for part, pair in stored(name).items()
            for letter, matrix in zip("AB", pair, strict=True)
        }
        with set_current_vllm_config(VllmConfig()):
            base = make(name)
        packed = {name: list(OUTPUTS[name])}
        made.append(adapt_linear(f"layer.{name}", base, lora, packed, 1.0, Gate()))
    return made


@pytest.mark.parametrize("size", [1, 2, 4])  # 4 ranks share two key-value heads
@pytest.mark.parametrize("name", ["qkv_proj", "gate_up_proj"])
def test_ranks_with_a_split_output_hold_the_whole_adapter(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    whole = {part: x @ down.T @ up.T for part, (down, up) in stored(name).items()}
    for rank, layer in enumerate(shards(name, size, monkeypatch)):
        own = []
        for part, expected in whole.items():
            copies = 2 if size == 4 and part in ("k_proj", "v_proj") else 1  # ranks that hold the same rows
            own.append(expected.chunk(size // copies, dim=1)[rank // copies])
        torch.testing.assert_close(x @ layer.down.T @ layer.up.T, torch.cat(own, dim=1))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_with_a_split_input_sum_to_the_adapter(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, INNER, generator=torch.Generator().manual_seed(1))
    layers = shards("down_proj", size, monkeypatch)
    assert all(layer.is_split_input == (size > 1) for layer in layers)
    low = sum(part @ layer.down.T for part, layer in zip(x.chunk(size, dim=1), layers, strict=True))
    (down, up) = stored("down_proj")["down_proj"]
    for layer in layers:
        torch.testing.assert_close(low @ layer.up.T, x @ down.T @ up.T)


@pytest.mark.parametrize("start, groups, width, lead", [(0, 3, 4, 1), (5, 1, 7, 0), (2, 2, 5, 2)])
@pytest.mark.parametrize("name", OUTPUTS)
def test_adapted_rows_take_two_products_and_others_stay(
    name: str, start: int, groups: int, width: int, lead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (layer,) = shards(name, 1, monkeypatch)
    weight = torch.randn(layer.base.weight.shape, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(layer.base, "forward", lambda x: x @ weight.T)
    x = torch.randn(12, weight.shape[1], generator=torch.Generator().manual_seed(1))
    every = x @ weight.T + torch.cat([x @ down.T @ up.T for down, up in stored(name).values()], dim=1)
    layer.gate.choose(start, groups, width, lead)
    with Operations() as counted:
        out = layer(x)
    is_adapted = [0 <= row - start < groups * width and (row - start) % width >= lead for row in range(len(x))]
    adapted = torch.tensor(is_adapted)
    torch.testing.assert_close(out[adapted], every[adapted])
    assert torch.equal(out[~adapted], (x @ weight.T)[~adapted])
    assert counted.names == ["aten::mm", "aten::bmm", "aten::baddbmm_"]
