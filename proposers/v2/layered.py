"""MtPC drafts from heads behind LoRA draft layers, on vLLM's Model Runner V2.

After every target pass, over all rows of its batch (prompt chunks too, also in steps that draft nothing: a later step
may attend to them), the residual stream that entered the target's layer L - K (vLLM's auxiliary hidden states) goes
through the draft layers (`draft_layers.py`). They write and read a KV cache of their own at the target's slots, with
the metadata of the target's pass. What leaves the final norm takes the place of the target's states for the head. Rows
of rejected drafts write states that are wrong, at positions which the next step writes again before it reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_mtpc.proposers.heads.load import kept
from vllm_mtpc.proposers.v2.draft_layers import load_draft_layers
from vllm_mtpc.proposers.v2.shared_modules import eager_priorities
from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator


class LayeredSpeculator(MtpcSpeculator):
    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        head = super().load_draft_model(target_model, target_attn_layer_names)
        spec = self.speculative_config
        self.layers = load_draft_layers(
            Path(spec.model_folder), spec.head, target_model, self.vllm_config, self.dtype, self.device
        )
        head.kept_layers = kept(self.layers.buffers())
        self.priorities = eager_priorities(self.vllm_config)
        target_model.set_aux_hidden_state_layers((self.layers.first,))
        return head

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
