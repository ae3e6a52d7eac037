"""EVA attention as a vLLM layer: two paged caches per decoder layer, in one KV cache group.

The tokens of a request have an ordinary paged KV cache. Beside it lies a second one with a summary per chunk
(`tokens_per_state` = chunk size). Both specs are FullAttentionSpec of one block size, so vLLM gives them one block
table and one slot mapping, and its own manager does prefix caching, preemption and the rollback of drafts for both.
A block holds its tokens and their summaries; a prefix-cache hit brings both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_mtpc.models.evabyte import paged
from vllm_mtpc.models.evabyte.attend import attend, write_summaries, write_tokens
from vllm_mtpc.models.evabyte.plan import EvaPlan, make_plan
from vllm_mtpc.models.paged_cache import PagedCache, PlanBackend, PlanBuilder


class EvaPlanBuilder(PlanBuilder):
    """Builds the plan that all layers of a step share."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        config = vllm_config.model_config.hf_config
        self.sizes = {"window_size": config.window_size, "chunk_size": config.chunk_size}

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> EvaPlan:
        common = common_attn_metadata
        return make_plan(
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.slot_mapping[: common.num_actual_tokens],
            common.max_query_len,
            common.max_seq_len,
            block_size=self.kv_cache_spec.block_size,
            **self.sizes,
        )


class NoPlanBuilder(PlanBuilder):
    """Summaries go with the tokens' plan: they need none of their own."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttentionMetadata:
        return AttentionMetadata()


class EvaBackend(PlanBackend):
    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return EvaPlanBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """The smallest on a GPU is the block size there where the user names none."""
        return [MultipleOf(paged.BLOCK if current_platform.is_cuda() else 1)]


class SummaryBackend(EvaBackend):
    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return NoPlanBuilder


class SummaryCache(PagedCache):
    backend = SummaryBackend


class EvaAttention(PagedCache):
    """One rank's heads of EVA attention, with the cache of their tokens; `rfa` is the cache of the summaries."""

    backend = EvaBackend

    def __init__(self, num_heads: int, head_size: int, window_size: int, chunk_size: int, prefix: str) -> None:
        super().__init__(prefix, num_heads, head_size)
        self.rfa = SummaryCache(f"{prefix}.rfa", num_heads, head_size, tokens_per_state=chunk_size)
        self.window_size, self.chunk_size = window_size, chunk_size
        self.flash: Callable[..., Any] | None = None

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Only now the block size is known, and with it how to attend."""
        super().bind_kv_cache(kv_cache)
        if paged.fits(self.dtype, self.window_size, self.chunk_size, kv_cache.shape[2]):
            self.flash = paged.flash_attention(self.head_size)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mu: Tensor, phi: Tensor) -> Tensor:
        """Attention [T, H * D] of query, key, value [T, H * D] (rotated), with mu, phi [H, D]; fills the caches."""
        plans = get_forward_context().attn_metadata
        if plans is None:  # vLLM measures memory before there are caches
            return torch.zeros_like(query)
        plan: EvaPlan = plans[self.layer_name]
        rows = len(plan.token_block)
        query, key, value = (x.view(-1, self.num_heads, self.head_size) for x in (query, key, value))
        write_tokens(self.kv_cache, key[:rows], value[:rows], plan)
        write_summaries(self.rfa.kv_cache, self.kv_cache, mu, phi, plan)
        caches = self.kv_cache, self.rfa.kv_cache
        if self.flash is None:
            return attend(query, *caches, plan).flatten(1)
        return paged.attend(query, *caches, plan, self.flash, self.head_size**-0.5).flatten(1)
