"""EvaByte for vLLM: Llama's layers with EVA attention and norms that scale by 1 + weight.

Weights have the names of the published checkpoints. The target uses the first of eight lm_heads, which predicts the
next byte; head h is rows [V h, V (h + 1)) of lm_head.weight. The others can start a draft head (docs/internals.md).

EVA attention has two paged caches per decoder layer, of tokens and of a summary per chunk. By default each cache
is a KV cache group with its own block table, and vLLM frees the tokens of finished windows; older windows are read as
summaries. Else both specs are FullAttentionSpec of one block size with one block table and one slot mapping. The groups
share one pool of equal pages. With blocks of B tokens (vLLM's block size) and chunks of C, a block of summaries covers
B tokens and a block of tokens B / C:

    summaries   FullAttentionSpec, B tokens in B / C states: kept for the whole text
    tokens      WindowSpec, B / C tokens: freed when their window is finished

vLLM frees by verified tokens, never by drafts, so the window of a rejected draft still exists.

Prefix caching: a hit of L tokens needs all summaries before L, and the tokens of L's own window before L. vLLM's
manager of chunked attention looks up the latter, but not for groups of different block sizes. B divides the window, so
truncating a hit to a multiple of B keeps it in a window whose tokens were looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
    subclass_attention_backend,
)  # fmt: skip
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec

from vllm_mtpc.models.evabyte import attend
from vllm_mtpc.models.evabyte.attend import EvaPlan, SummaryPlan, make_plan, make_summary_plan
from vllm_mtpc.models.evabyte.config import GPU_BLOCK
from vllm_mtpc.models.paged_cache import PagedCache, PlanBackend

logger = init_logger(__name__)
KVCacheSpecRegistry._ensure_registered()  # vLLM registers its own only where nothing is registered yet


class WindowManager(ChunkedLocalAttentionManager):
    @classmethod
    def find_longest_cache_hit(
        cls, *, kv_cache_spec: Any, alignment_tokens: int, **others: Any
    ) -> tuple[tuple[list[Any], ...], int]:
        """Return the blocks, by group, of the longest hit of a multiple of `alignment_tokens`, and its length."""
        block = kv_cache_spec.block_size
        found, length = super().find_longest_cache_hit(kv_cache_spec=kv_cache_spec, alignment_tokens=block, **others)
        length -= length % alignment_tokens
        return tuple(blocks[: length // block] for blocks in found), length


@register_kv_cache_spec(manager_class=WindowManager)
@dataclass(frozen=True, kw_only=True)
class WindowSpec(ChunkedLocalAttentionSpec):
    """Tokens of windows of `attention_chunk_size`."""


def frees_windows(vllm_config: VllmConfig, window_size: int) -> bool:
    """Whether tokens of past windows are freed: not if one KV cache group is required, or blocks do not fit."""
    spec, block = vllm_config.speculative_config, vllm_config.cache_config.block_size
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager or vllm_config.kv_transfer_config is not None:
        return False
    if spec is not None and spec.use_eagle():  # would drop the last block of a hit, which vLLM cannot do in windows
        return False
    if window_size % block:
        text = "EvaByte keeps the tokens of all windows: blocks of %d tokens do not divide its window of %d."
        logger.info_once(text, block, window_size)
        return False
    return True


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
    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        """Return the allowed sizes; vLLM's default on a GPU is the smallest. Tokens of windows have a C-th of it."""
        is_any = isinstance(kv_cache_spec, WindowSpec) or not current_platform.is_cuda()
        return [MultipleOf(1 if is_any else GPU_BLOCK)]


class SummaryCache(PagedCache):
    backend = subclass_attention_backend("Summary", EvaBackend, SummaryPlanBuilder)


class EvaAttention(PagedCache):
    """EVA attention of one rank's heads, with the cache of their tokens; `rfa` is the cache of their summaries."""

    backend = subclass_attention_backend("Token", EvaBackend, EvaPlanBuilder)

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


class EvaByteAttention(LlamaAttention):
    """q, k, v, o projections and rotary embedding around EvaAttention; others: the parent's arguments, unused."""

    def __init__(
        self, config: Any, hidden_size: int, num_heads: int, quant_config: Any, prefix: str, **others: Any
    ) -> None:
        nn.Module.__init__(self)
        self.num_heads = num_heads // get_tensor_model_parallel_world_size()
        self.head_dim = hidden_size // num_heads
        self.q_size = self.kv_size = self.num_heads * self.head_dim
        self.max_position_embeddings = config.max_position_embeddings
        self.qkv_proj = QKVParallelLinear(
            hidden_size, self.head_dim, num_heads, bias=False, quant_config=quant_config, prefix=f"{prefix}.qkv_proj"
        )
        self.o_proj = RowParallelLinear(
            hidden_size, hidden_size, bias=False, quant_config=quant_config, prefix=f"{prefix}.o_proj"
        )
        self._init_rotary_emb(config, quant_config)
        self.adaptive_phi, self.adaptive_mu_k = self._per_head(), self._per_head()
        sizes = config.window_size, config.chunk_size
        self.attn = EvaAttention(self.num_heads, self.head_dim, *sizes, prefix=f"{prefix}.attn")

    def _per_head(self) -> nn.Parameter:
        """Return a parameter [1, H, 1, 1, D], as in the checkpoint, of this rank's heads."""
        parameter = nn.Parameter(torch.zeros(1, self.num_heads, 1, 1, self.head_dim), requires_grad=False)
        set_weight_attrs(parameter, {"weight_loader": sharded_weight_loader(1)})
        return parameter

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        query, key = self.rotary_emb(positions, query, key)
        mu, phi = (p.view(self.num_heads, self.head_dim) for p in (self.adaptive_mu_k, self.adaptive_phi))
        output = torch.ops.vllm.mtpc_eva_attention(query, key, value, mu, phi, self.attn.layer_name)
        return self.o_proj(output)[0]


class EvaByteDecoderLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: Any = None) -> None:
        super().__init__(vllm_config, prefix, config, attn_layer_type=EvaByteAttention)
        config = config or vllm_config.model_config.hf_config
        self.input_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps)


class EvaByteForCausalLM(LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=EvaByteDecoderLayer)
        self.model.norm = GemmaRMSNorm(self.config.hidden_size, self.config.rms_norm_eps)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the weights; of lm_head only the first head's rows."""
        rows = self.config.vocab_size
        return super().load_weights(
            (name, weight[:rows] if name.endswith("lm_head.weight") else weight) for name, weight in weights
        )
