"""MtPC drafts of heads with LoRA draft layers, on vLLM's Model Runner V2 (MtPC, section 3.3).

Draft layers are a copy of the target's last K layers with adapters and their own KV cache. Linear layers share the
target's weights and add LoRA on every row (`lora.py`); attention layers are twins: same weights and kernels, another
name. vLLM gives a twin a cache in the KV cache group of the layer that it copies, so block tables, slots and attention
metadata of a step hold for it too.

Algorithm, after every target forward pass, also in steps without drafts: the residual stream of all rows that entered
the target's layer L - K (vLLM's auxiliary hidden states) goes through the draft layers. The head reads the states after
the final norm. Rows of rejected drafts write wrong states, which the next step writes again before it reads them.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from vllm_mtpc.checkpoint.load import read_adapters
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.proposers.v2.lora import Gate, Replace, copy_adapted, copy_modules
from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator, TargetPass
from vllm_mtpc.proposers.worker.load import kept

NAME = "mtpc."  # before a layer's name: its twin's


class ServedDraftLayers(nn.Module):
    """Copies of the target's layers from `first` on, and of its final norm."""

    def __init__(self, first: int, layers: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.norm = first, nn.ModuleList(layers), norm

    def forward(self, positions: Tensor, states: Tensor) -> Tensor:
        """Return the head's input [T, D] from the residual stream [T, D] that enters the target's layer `first`."""
        residual = None
        for layer in self.layers:
            states, residual = layer(positions, states, residual)
        return self.norm(states, residual)[0]


def load_draft_layers(target: nn.Module, vllm_config: VllmConfig, device: torch.device) -> ServedDraftLayers:
    """Load the draft layers of a head on vLLM's target; CheckpointError: they are not of its last layers."""
    spec = vllm_config.speculative_config
    info = read_adapters(Path(spec.model_folder), spec.head)
    lora = {name: value.to(device, vllm_config.model_config.dtype) for name, value in info.tensors.items()}
    layers, names = target.model.layers, vllm_config.compilation_config.static_forward_context
    if info.layers != list(range(len(layers)))[-spec.head.lora_layers :]:
        reason = f"of a target with {len(layers)}: allowed are the last ones; use a head of this target"
        raise CheckpointError(f"head {spec.model_folder} adapts layers {info.layers} {reason}")

    def copy_attention(name: str, module: nn.Module, replace: Replace) -> nn.Module | None:
        if not isinstance(module, AttentionLayerBase):
            return None
        twin = copy.copy(module)
        twin.layer_name, twin.kv_cache = NAME + module.layer_name, torch.tensor([])
        if hasattr(module, "impl"):  # an implementation may keep state of its layer
            twin.impl = copy.copy(module.impl)
        children = module._modules.items()
        twin.__dict__["_modules"] = {key: copy_modules(child, f"{name}.{key}", replace) for key, child in children}
        names[twin.layer_name] = twin
        return twin

    modules = {f"model.layers.{index}": layers[index] for index in info.layers} | {"model.norm": target.model.norm}
    *copies, norm = copy_adapted(target, modules, lora, info.alpha / info.rank, Gate(), copy_attention)
    return ServedDraftLayers(info.layers[0], copies, norm)


class LayeredSpeculator(MtpcSpeculator):
    """The drafts of a head with LoRA draft layers."""

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        head = super().load_draft_model(target_model, target_attn_layer_names)
        self.layers = load_draft_layers(target_model, self.vllm_config, self.device)
        head.kept_layers = kept(self.layers.buffers())
        target_model.set_aux_hidden_state_layers((self.layers.first,))
        return head

    def _read_states(self, done: TargetPass) -> Tensor:
        (states,), metadata, slots = done.aux_states, done.attn_metadata, done.slot_mappings
        names, num_rows = self.draft_attn_layer_names, len(states)
        context = set_forward_context(
            metadata and {name: metadata[name] for name in names},
            self.vllm_config,
            num_tokens=num_rows,
            num_tokens_across_dp=done.dp_sync_state and done.dp_sync_state.num_tokens_across_dp,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping={name: slots[name][:num_rows] for name in names} if slots else {},
            batch_descriptor=BatchDescriptor(num_tokens=num_rows),
        )
        with context, self.priorities.set_priority():
            # norms add to the stream in place
            return self.layers(done.batch.positions[:num_rows], states.clone())
