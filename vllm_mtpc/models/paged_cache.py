"""Additional caches in vLLM's paged KV cache: layers that vLLM allocates and addresses like attention layers.

Layers with the same block size share a block table and a slot mapping, so prefix caching, preemption and the rollback
of rejected drafts hold for these caches as they do for keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec


class PlanBackend(AttentionBackend):
    """Base of backends that name a builder alone (`subclass_attention_backend`); the layer computes the attention."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        raise NotImplementedError("layers of this backend compute for themselves")


class PagedCache(nn.Module, AttentionLayerBase):
    """A cache [blocks, num_heads, block_size / tokens_per_state, 2 * head_size] that vLLM binds to `kv_cache`."""

    backend: type[AttentionBackend]

    def __init__(
        self, prefix: str, num_heads: int, head_size: int, dtype: torch.dtype | None = None, tokens_per_state: int = 1
    ) -> None:
        super().__init__()
        self.layer_name = prefix
        self.num_heads, self.head_size, self.tokens_per_state = num_heads, head_size, tokens_per_state
        self.dtype = dtype or torch.get_default_dtype()
        self.kv_cache = torch.tensor([])
        get_current_vllm_config().compilation_config.static_forward_context[prefix] = self

    def get_attn_backend(self) -> type[AttentionBackend]:
        return self.backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        return FullAttentionSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            tokens_per_state=self.tokens_per_state,
        )
