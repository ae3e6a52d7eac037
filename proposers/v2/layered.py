"""MtPC drafts from heads behind LoRA draft layers, on vLLM's Model Runner V2.

Draft layers are the target's last K layers once more, with adapters and a KV cache of their own. Containers are copied;
everything that holds weights is the target's, so draft layers cost their adapters and their share of the KV cache.
Linear layers gain LoRA on every row (`lora.py`, sharded as the target is), what the target has compiled runs as a
kernel, and attention layers are twins: same weights and kernels, another name. vLLM finds a twin by its name and gives
it a cache in the KV cache group of the layer it is a twin of, so block tables, slots and attention metadata of a step
hold for it too, and with them prefix caching, preemption and the rollback of drafts.

After every target pass, over all rows of its batch (prompt chunks too, also in steps that draft nothing: a later step
may attend to them), the residual stream that entered the target's layer L - K (vLLM's auxiliary hidden states) goes
through the draft layers. They write and read their cache at the target's slots, with the metadata of the target's pass.
What leaves the final norm takes the place of the target's states for the head. Rows of rejected drafts write states
that are wrong, at positions which the next step writes again before it reads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_mtpc.checkpoint.load import load_adapters
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.proposers.heads.load import kept
from vllm_mtpc.proposers.v2.lora import Gate, adapted, refuse_left, retaken
from vllm_mtpc.proposers.v2.shared_modules import copied, eager_priorities, with_kernel
from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator

NAME = "mtpc."  # in front of a layer's name: its twin's


class DraftLayers(nn.Module):
    """The target's layers from `first` on, and its final norm."""

    def __init__(self, first: int, layers: list[nn.Module], norm: nn.Module) -> None:
        super().__init__()
        self.first, self.layers, self.norm = first, nn.ModuleList(layers), norm

    def forward(self, positions: Tensor, states: Tensor) -> Tensor:
        """What the head reads, [T, D]; states [T, D]: the residual stream that enters the target's layer `first`."""
        residual = None
        for layer in self.layers:
            states, residual = layer(positions, states, residual)
        return self.norm(states, residual)[0]


def load_draft_layers(target: nn.Module, vllm_config: VllmConfig, device: torch.device) -> DraftLayers:
    """The draft layers of a head on vLLM's target. Raises CheckpointError where an adapter has no place in it."""
    spec = vllm_config.speculative_config
    info, lora = load_adapters(Path(spec.model_folder), spec.head, vllm_config.model_config.dtype, device)
    layers, gate = target.model.layers, Gate()
    packed = getattr(target, "packed_modules_mapping", {})
    names = vllm_config.compilation_config.static_forward_context

    def replace(name: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, LinearBase):
            return adapted(name, module, lora, packed, info.alpha / info.rank, gate)
        if isinstance(module, AttentionLayerBase):
            twin = copy.copy(module)
            twin.layer_name, twin.kv_cache = NAME + module.layer_name, torch.tensor([])
            if hasattr(module, "impl"):  # what an implementation remembers of its layer
                twin.impl = copy.copy(module.impl)
            children = module._modules.items()
            twin.__dict__["_modules"] = {key: copied(child, f"{name}.{key}", replace) for key, child in children}
            names[twin.layer_name] = twin
            return twin
        return with_kernel(module)

    if info.layers != list(range(len(layers)))[-spec.head.lora_layers :]:
        raise CheckpointError(
            f"head {spec.model_folder} adapts layers {info.layers} of a target with {len(layers)}: allowed are the "
            "last ones; use a head of this target"
        )
    made = [copied(layers[index], f"model.layers.{index}", replace) for index in info.layers]
    refuse_left(lora, target)
    return DraftLayers(info.layers[0], made, copied(target.model.norm, "model.norm", replace))


class LayeredSpeculator(MtpcSpeculator):
    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        head = super().load_draft_model(target_model, target_attn_layer_names)
        self.layers = load_draft_layers(target_model, self.vllm_config, self.device)
        head.kept_layers = kept(self.layers.buffers())
        self.priorities = eager_priorities(self.vllm_config)
        target_model.set_aux_hidden_state_layers((self.layers.first,))
        return head

    @torch.inference_mode()
    def prepared(self, made: Any, target_model: nn.Module) -> Callable[[], None]:
        commit = super().prepared(made, target_model)
        info, lora = load_adapters(Path(made.model_folder), made.head, self.dtype, self.device)
        take = retaken(self.layers, lora, info.alpha / info.rank, target_model)

        def both() -> None:
            commit()
            take()

        return both

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        assert aux_hidden_states is not None  # `load_draft_model` asks the target for them
        states = self._states(input_batch, attn_metadata, slot_mappings, aux_hidden_states[0], **kwargs)
        return super().propose(input_batch, attn_metadata, slot_mappings, states, None, *args, **kwargs)

    def _states(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any] | None,  # None: vLLM measures memory before there are caches
        slot_mappings: dict[str, Tensor] | None,
        trunk: Tensor,  # [T, D], rows that pad a captured graph's batch included
        dp_sync_state: Any = None,
        **others: Any,
    ) -> Tensor:
        """States [T, D] behind the draft layers."""
        num_rows, names = trunk.shape[0], self.draft_attn_layer_names
        context = set_forward_context(
            attn_metadata and {name: attn_metadata[name] for name in names},
            self.vllm_config,
            num_tokens=num_rows,
            num_tokens_across_dp=dp_sync_state and dp_sync_state.num_tokens_across_dp,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping={name: slot_mappings[name][:num_rows] for name in names} if slot_mappings else {},
            batch_descriptor=BatchDescriptor(num_tokens=num_rows),
        )
        with context, self.priorities.set_priority():
            # a copy: norms add to the residual stream in place
            return self.layers(input_batch.positions[:num_rows], trunk.clone())
