"""EVA attention as a vLLM layer: two paged caches per decoder layer, of tokens and of a summary per chunk.

By default each cache is a KV cache group with its own block table, and vLLM frees the tokens of finished windows
(`window.py`). Else both specs are FullAttentionSpec of one block size with one block table and one slot mapping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from vllm_mtpc.models.evabyte import attend
from vllm_mtpc.models.evabyte.config import GPU_BLOCK
from vllm_mtpc.models.evabyte.plan import EvaPlan, SummaryPlan, make_plan, make_summary_plan
from vllm_mtpc.models.evabyte.window import WindowSpec, frees_windows
from vllm_mtpc.models.paged_cache import PagedCache, PlanBackend


class _StepBuilder(AttentionMetadataBuilder[Any]):
    """Builds the plan that all layers of a step share, at fixed addresses for decode steps (CUDA graphs)."""

    make: Callable[..., Any]  # the plan of a step

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        config, spec = vllm_config.model_config.hf_config, vllm_config.speculative_config
        self.sizes = {"window_size": config.window_size, "chunk_size": config.chunk_size}
        self.max_rows = 1 + (spec.num_speculative_tokens if spec is not None else 0)  # of a request that decodes
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs
        self.max_seq_len = vllm_config.model_config.max_model_len
        self.buffers: dict[str, Tensor] = {}

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Support graphs of decode steps where FlashAttention needs no loop over segments on the host."""
        config, block = vllm_config.model_config.hf_config, vllm_config.cache_config.block_size
        states = block // config.chunk_size
        tokens = states if frees_windows(vllm_config, config.window_size) else block
        # V1 passes the specs of a whole group, tokens and summaries, which have one dtype
        spec = next(iter(getattr(kv_cache_spec, "kv_cache_specs", {}).values()), kv_cache_spec)
        fits = attend.fits(spec.dtype, config.window_size, tokens, states)
        return AttentionCGSupport.UNIFORM_BATCH if fits else AttentionCGSupport.NEVER

    def plan(self, step: CommonAttentionMetadata) -> Any:
        return self.make(step, block_size=self.kv_cache_spec.block_size, **self.sizes)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        plan = self.plan(common_attn_metadata)
        if common_attn_metadata.max_query_len > self.max_rows or current_platform.is_cpu():
            return plan
        if not self.buffers:
            self._allocate(common_attn_metadata)
        kept = {name: buffer[: len(getattr(plan, name))] for name, buffer in self.buffers.items()}
        for name, buffer in kept.items():
            buffer.copy_(getattr(plan, name))
        return replace(plan, **kept)

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        return self.build(0, replace(common_attn_metadata, max_seq_len=self.max_seq_len))

    def _allocate(self, step: CommonAttentionMetadata) -> None:
        """Allocate buffers for the largest plan of a decode step."""
        requests, rows, table = self.max_num_seqs, self.max_rows, step.block_table_tensor
        starts = torch.arange(0, requests * rows + 1, rows, dtype=torch.int32, device=table.device)
        largest = self.plan(
            replace(
                step,
                query_start_loc=starts,
                seq_lens=torch.full_like(starts[1:], rows),
                block_table_tensor=table.new_zeros(requests, table.shape[1]),
                slot_mapping=torch.zeros(requests * rows, dtype=torch.int64, device=table.device),
                num_actual_tokens=requests * rows,
                max_query_len=rows,
                max_seq_len=self.max_seq_len,
            )
        )
        # vLLM's block tables have fixed addresses already
        self.buffers = {
            field.name: torch.zeros_like(value)
            for field in fields(largest)
            if isinstance(value := getattr(largest, field.name), Tensor) and field.name != "block_table"
        }


class EvaPlanBuilder(_StepBuilder):
    make = staticmethod(make_plan)


class SummaryPlanBuilder(_StepBuilder):
    make = staticmethod(make_summary_plan)


class EvaBackend(PlanBackend):
    builder = EvaPlanBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Return the allowed sizes; vLLM's default on a GPU is the smallest. Tokens of windows have a C-th of it."""
        is_any = isinstance(kv_cache_spec, WindowSpec) or not current_platform.is_cuda()
        return [MultipleOf(1 if is_any else GPU_BLOCK)]


class SummaryBackend(EvaBackend):
    builder = SummaryPlanBuilder


class SummaryCache(PagedCache):
    backend = SummaryBackend


class EvaAttention(PagedCache):
    """EVA attention of one rank's heads, with the cache of their tokens; `rfa` is the cache of their summaries."""

    backend = EvaBackend

    def __init__(self, num_heads: int, head_size: int, window_size: int, chunk_size: int, prefix: str) -> None:
        super().__init__(prefix, num_heads, head_size)
        self.rfa = SummaryCache(f"{prefix}.rfa", num_heads, head_size, tokens_per_state=chunk_size)
        self.window_size, self.chunk_size = window_size, chunk_size

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        if not frees_windows(vllm_config, self.window_size):
            return super().get_kv_cache_spec(vllm_config)
        return WindowSpec(
            block_size=vllm_config.cache_config.block_size // self.chunk_size,  # so that pages are the summaries' size
            num_kv_heads=self.num_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            attention_chunk_size=self.window_size,
        )

    @cached_property
    def flash(self) -> Callable[..., Any] | None:
        """FlashAttention if it can read the two caches, which are allocated before the first step; else None."""
        entries = self.kv_cache.shape[2], self.rfa.kv_cache.shape[2]
        if not attend.fits(self.dtype, self.window_size, *entries):
            return None
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

        return partial(flash_attn_varlen_func, fa_version=get_flash_attn_version(head_size=self.head_size))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mu: Tensor, phi: Tensor) -> Tensor:
        """Return the attention [T, H * D] of query, key, value [T, H * D] (rotated); fills the caches.

        mu, phi: [H, D], parameters of the summaries.
        """
        plans = get_forward_context().attn_metadata
        if plans is None:  # vLLM measures memory before there are caches
            return torch.zeros_like(query)
        plan: EvaPlan = plans[self.layer_name]
        places: SummaryPlan = plans[self.rfa.layer_name]
        rows = len(plan.token_block)
        query, key, value = (x.view(-1, self.num_heads, self.head_size) for x in (query, key, value))
        caches = self.kv_cache, self.rfa.kv_cache
        attend.write_tokens(caches[0], key[:rows], value[:rows], plan)
        attend.write_summaries(caches[1], caches[0], mu, phi, plan, places)
        if self.flash is None:
            return attend.attend(query, *caches, plan, places).flatten(1)
        return attend.attend_paged(query, *caches, plan, places, self.flash).flatten(1)


def _attention(query: Tensor, key: Tensor, value: Tensor, mu: Tensor, phi: Tensor, layer_name: str) -> Tensor:
    return get_forward_context().no_compile_layers[layer_name](query, key, value, mu, phi)


def _empty(query: Tensor, key: Tensor, value: Tensor, mu: Tensor, phi: Tensor, layer_name: str) -> Tensor:
    return query.new_empty(query.shape)


# opaque to torch.compile: the plan, the caches and the loop over segments change from step to step
direct_register_custom_op("mtpc_eva_attention", _attention, fake_impl=_empty)
