"""LoRA draft layers in a worker: the target's last K layers once more, with adapters and a KV cache of their own.

Containers are copied; everything that holds weights is the target's own, so draft layers cost their adapters and their
share of the KV cache. Linear layers gain LoRA on every row (`lora.py`, sharded as the target is), what the target
has compiled runs as a kernel, and attention layers are twins: same weights and kernels, another name. vLLM
finds a twin by its name and gives it a cache in the KV cache group of the layer it is a twin of, so block tables, slots
and attention metadata of a step hold for it too, and with them prefix caching, preemption and the rollback of drafts.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import LinearBase

from vllm_mtpc.checkpoint.load import load_adapters
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.proposers.v2.lora import Gate, adapted, refuse_left
from vllm_mtpc.proposers.v2.shared_modules import copied, with_kernel

NAME = "mtpc."  # in front of a layer's name: its twin's


class DraftLayers(nn.Module):
    """The target's layers from `first` on, and its final norm."""

    def __init__(self, first: int, layers: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(self, positions: Tensor, states: Tensor) -> Tensor:
        """What the head reads, [T, D]; states [T, D]: the residual stream that enters the target's layer `first`."""
        residual = None
        for layer in self.layers:
            states, residual = layer(positions, states, residual)
        return self.norm(states, residual)[0]


def load_draft_layers(
    folder: Path,
    config: HeadConfig,
    target: nn.Module,
    vllm_config: VllmConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> DraftLayers:
    """The draft layers of a head on vLLM's target. Raises CheckpointError where an adapter has no place in it."""
    info, lora = load_adapters(folder, config, dtype, device)
    first, gate = info.layers[0], Gate()
    packed = getattr(target, "packed_modules_mapping", {})
    names = vllm_config.compilation_config.static_forward_context

    def replace(name: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, LinearBase):
            return adapted(name, module, lora, packed, info.alpha / info.rank, gate)
        if isinstance(module, AttentionLayerBase):
            twin = _twin(module)
            twin.__dict__["_modules"] = {
                key: copied(child, f"{name}.{key}", replace) for key, child in module._modules.items()
            }
            names[twin.layer_name] = twin
            return twin
        return with_kernel(module)

    layers = target.model.layers
    if info.layers != list(range(len(layers)))[-config.lora_layers :]:
        raise CheckpointError(
            f"head {folder} adapts layers {info.layers} of a target with {len(layers)}: allowed are the last ones; use "
            "a head of this target"
        )
    made = [copied(layers[index], f"model.layers.{index}", replace) for index in info.layers]
    refuse_left(lora, target)
    return DraftLayers(first, made, copied(target.model.norm, "model.norm", replace))


def _twin(layer: AttentionLayerBase) -> AttentionLayerBase:
    """An attention layer with the same weights and kernels, under a name and with a cache of its own."""
    twin = copy.copy(layer)
    twin.layer_name = NAME + layer.layer_name
    twin.kv_cache = torch.tensor([])
    if hasattr(layer, "impl"):  # what an implementation remembers of its layer
        twin.impl = copy.copy(layer.impl)
    return twin
