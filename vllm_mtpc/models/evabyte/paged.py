"""EVA attention on a GPU: two calls of vLLM's paged FlashAttention, merged by log-sum-exp.

One call reads the tokens of each segment's own window (causal), one the summaries of earlier windows (all of them).
Their pages are those of the two caches as they are; nothing is gathered. Shapes are static and nothing waits for the
host. The arguments are tested against a paged attention written down in tests/models; no GPU has run it yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from vllm_mtpc.models.evabyte.plan import EvaPlan, SummaryPlan

PAGE = 16  # FlashAttention takes pages of multiples of this many entries
BLOCK = 256  # tokens; its summaries are a page where a chunk has 16 tokens or fewer


def fits(dtype: torch.dtype, window_size: int, tokens: int, states: int) -> bool:
    """Whether FlashAttention can read caches with so many tokens or summaries in a block here."""
    return (
        current_platform.is_cuda()
        and dtype in (torch.float16, torch.bfloat16)
        and tokens % PAGE == 0
        and states % PAGE == 0
        and window_size % tokens == 0
    )


def flash_attention(head_size: int) -> Callable[..., Any]:
    """vLLM's FlashAttention of the version that this GPU takes."""
    from functools import partial

    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    return partial(flash_attn_varlen_func, fa_version=get_flash_attn_version(head_size=head_size))


def attend(
    query: Tensor,
    cache: Tensor,
    summaries: Tensor,
    plan: EvaPlan,
    places: SummaryPlan,
    flash: Callable[..., Any],
    scale: float,
) -> Tensor:
    """Output [T, H, D] of query [T, H, D], as `attend.attend`; rows of no segment are undefined."""
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    common = {"q": query, "cu_seqlens_q": plan.segment_start, "max_seqlen_q": plan.max_rows, "softmax_scale": scale}
    key, value = _pages(cache)
    own, own_lse = flash(
        **common,
        k=key,
        v=value,
        seqused_k=plan.segment_tokens,
        max_seqlen_k=min(plan.max_seq_len, plan.window_size),
        causal=True,
        block_table=plan.window_blocks,
        return_softmax_lse=True,
    )[:2]
    if plan.max_seq_len <= plan.window_size:
        return own
    key, value = _pages(summaries)
    earlier, earlier_lse = flash(
        **common,
        k=key,
        v=value,
        seqused_k=plan.segment_chunks,
        max_seqlen_k=plan.max_seq_len // plan.chunk_size,
        causal=False,
        block_table=places.segment_blocks,
        return_softmax_lse=True,
    )[:2]
    out = torch.empty_like(query)
    merge_attn_states(out, earlier, earlier_lse, own, own_lse)
    return out


def _pages(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [blocks, N, H, D] of a cache, views."""
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides

    key, value = cache.transpose(1, 2).chunk(2, dim=-1)
    return canonicalize_singleton_dim_strides(key), canonicalize_singleton_dim_strides(value)
