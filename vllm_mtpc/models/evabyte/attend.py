"""EVA attention over two paged caches, of tokens and of chunk summaries (formulas: docs/internals.md).

A cache has the shape [blocks, H, N, 2D]: keys in the first D numbers, values in the others; N is the number of tokens
or summaries in a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.platforms import current_platform

from vllm_mtpc.models.evabyte.plan import EvaPlan, SummaryPlan

PAGE = 16  # FlashAttention takes pages of a multiple of 16 entries


def write_tokens(cache: Tensor, key: Tensor, value: Tensor, plan: EvaPlan) -> None:
    """Store key, value [T, H, D] in their slots; padding rows go to block 0."""
    cache[plan.token_block, :, plan.token_offset] = torch.cat([key, value], dim=-1).to(cache.dtype)


def write_summaries(
    summaries: Tensor, cache: Tensor, mu: Tensor, phi: Tensor, plan: EvaPlan, places: SummaryPlan
) -> None:
    """Compute the summaries of the chunks that this step completes from the tokens in `cache`, and store them."""
    tokens = cache[plan.chunk_block, :, plan.chunk_offset]  # [n, C, H, 2D]
    summaries[places.chunk_block, :, places.chunk_state] = summarise(tokens, mu, phi).to(summaries.dtype)


def summarise(tokens: Tensor, mu: Tensor, phi: Tensor) -> Tensor:
    """Return the summaries [n, H, 2D], float32, of chunks [n, C, H, 2D], with mu, phi [H, D].

    Keys are averaged with softmax(mu k), values with softmax(s (phi k - |k|^2 / 2)), s = D ** -0.5.
    """
    key, value = tokens.float().chunk(2, dim=-1)
    of_keys = (key * mu.float()).sum(-1).softmax(dim=1)
    exponent = (key * phi.float()).sum(-1) - key.square().sum(-1) / 2
    of_values = (exponent * key.shape[-1] ** -0.5).softmax(dim=1)  # [n, C, H]
    return torch.cat([(of_keys[..., None] * key).sum(1), (of_values[..., None] * value).sum(1)], dim=-1)


def attend(query: Tensor, cache: Tensor, summaries: Tensor, plan: EvaPlan, places: SummaryPlan) -> Tensor:
    """Return the attention [T, H, D] of query [T, H, D], segment by segment in PyTorch; 0 for padding rows.

    It runs on a CPU and on any platform without paged attention kernels.
    """
    out = torch.zeros_like(query)
    for segment in plan.segments():
        rows = slice(segment.row, segment.row + segment.num_rows)
        first = segment.window * plan.window_size
        num_chunks = first // plan.chunk_size
        earlier = _gather(summaries, places.block_table[segment.request].long(), 0, num_chunks, places.states)
        window = _gather(cache, plan.block_table[segment.request].long(), first, segment.tokens, plan.block_size)
        key, value = torch.cat([earlier, window], dim=1).to(query.dtype).chunk(2, dim=-1)
        mask = torch.ones(segment.num_rows, key.shape[1], dtype=torch.bool, device=cache.device)
        mask = mask.tril(key.shape[1] - segment.num_rows)
        out[rows] = F.scaled_dot_product_attention(query[rows].transpose(0, 1), key, value, mask).transpose(0, 1)
    return out


def _gather(cache: Tensor, blocks: Tensor, start: int, count: int, per_block: int) -> Tensor:
    """Return entries [start, start + count) of a request from a paged cache, [H, count, 2D]."""
    first = start // per_block
    pages = cache[blocks[first : -(-(start + count) // per_block)]]  # [P, H, N, 2D]
    entries = pages.transpose(0, 1).flatten(1, 2)
    return entries[:, start - first * per_block :][:, :count]


def fits(dtype: torch.dtype, window_size: int, tokens: int, states: int) -> bool:
    """Whether FlashAttention can read caches with these numbers of tokens and summaries in a block on this device."""
    return (
        current_platform.is_cuda()
        and dtype in (torch.float16, torch.bfloat16)
        and tokens % PAGE == 0
        and states % PAGE == 0
        and window_size % tokens == 0
    )


def attend_paged(
    query: Tensor, cache: Tensor, summaries: Tensor, plan: EvaPlan, places: SummaryPlan, flash: Callable[..., Any]
) -> Tensor:
    """Return `attend` from two calls of vLLM's paged FlashAttention, merged by log-sum-exp; padding rows are undefined.

    One call reads the tokens of each segment's own window (causal), the other the summaries of earlier windows. Shapes
    are static and nothing waits for the host. Tested against a paged attention in PyTorch; it has not run on a GPU.
    """
    from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
    from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

    def part(pages: Tensor, used: Tensor, max_len: int, block_table: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp over pages [blocks, H, N, 2D]."""
        key, value = map(canonicalize_singleton_dim_strides, pages.transpose(1, 2).chunk(2, dim=-1))
        return flash(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=plan.segment_start,
            max_seqlen_q=plan.max_rows,
            seqused_k=used,
            max_seqlen_k=max_len,
            softmax_scale=query.shape[-1] ** -0.5,
            causal=causal,
            block_table=block_table,
            return_softmax_lse=True,
        )[:2]

    max_tokens = min(plan.max_seq_len, plan.window_size)
    window, window_lse = part(cache, plan.segment_tokens, max_tokens, plan.window_blocks, causal=True)
    if plan.max_seq_len <= plan.window_size:
        return window
    max_chunks = plan.max_seq_len // plan.chunk_size
    earlier, earlier_lse = part(summaries, plan.segment_chunks, max_chunks, places.segment_blocks, causal=False)
    out = torch.empty_like(query)
    merge_attn_states(out, earlier, earlier_lse, window, window_lse)
    return out
