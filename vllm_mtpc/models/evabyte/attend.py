"""EVA attention over two paged caches, of tokens and of chunk summaries (formulas: docs/internals.md).

A request's positions are divided into chunks of C positions with one summary each, and into windows of W positions. A
row at position t attends to the tokens of its own window up to t, and to the summaries of all chunks of earlier
windows. So a request's rows are divided into *segments*, one per window, whose rows attend to the same summaries.

After a rejected draft the next step starts at its position, writes its slot again and computes the summary of every
chunk that it completes again. Until then no row reads the stale summary, because the chunk's window is not finished.

All EVA layers of a step share its plan. It is made without synchronisation with the host. Tokens and summaries have one
block table or two (`vllm_model.py`), so each has a plan.

A cache has the shape [blocks, H, N, 2D]: keys in the first D numbers, values in the others; N is the number of tokens
or summaries in a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

PAGE = 16  # FlashAttention takes pages of a multiple of 16 entries


@dataclass(frozen=True)
class EvaPlan:
    """Plan of the tokens: R requests, T rows (padding included), n chunk candidates, S segments for each request.

    Padding rows and candidates after the last chunk have block 0, which vLLM gives to no request. Tensors are int64
    unless noted.
    """

    window_size: int
    chunk_size: int
    token_block: Tensor  # [T], block of each row's slot
    token_offset: Tensor  # [T], offset in the block
    chunk_block: Tensor  # [n, C], blocks of the tokens of each chunk that this step completes
    chunk_offset: Tensor  # [n, C], offsets in the blocks
    block_table: Tensor  # [R, M], int32
    segment_start: Tensor  # [R * S + 1], int32, first row of each segment
    segment_window: Tensor  # [R * S]
    segment_tokens: Tensor  # [R * S], int32, tokens of its window that its last row reads; 0 for an empty segment
    segment_chunks: Tensor  # [R * S], int32, summaries that its rows read
    window_blocks: Tensor  # [R * S, W / block size], int32, blocks of its window
    segments_per_request: int
    max_rows: int  # bound on the rows of a segment
    max_seq_len: int  # bound on the positions of a request


@dataclass(frozen=True)
class SummaryPlan:
    """Plan of the summaries, whose block table and block size may differ from the tokens'."""

    chunk_block: Tensor  # [n], block of the summary of each chunk candidate of the EvaPlan
    chunk_state: Tensor  # [n], offset in the block
    block_table: Tensor  # [R, M], int32
    segment_blocks: Tensor  # [R * S, M], int32, block table of each segment of the EvaPlan


def segments_of(max_query_len: int, window_size: int) -> int:
    """Return S, the maximum number of windows that max_query_len rows of a request lie in."""
    return (max(max_query_len, 1) + window_size - 2) // window_size + 1


def make_plan(step: CommonAttentionMetadata, window_size: int, chunk_size: int, block_size: int) -> EvaPlan:
    """Return the plan of a step of R requests and T rows; shapes depend on R, T and max_query_len only."""
    block_table, slots = step.block_table_tensor, step.slot_mapping[: step.num_actual_tokens].clamp(min=0)
    starts, ends, chunk, request = _completed_chunks(step, chunk_size)
    of_chunk = (chunk * chunk_size).clamp(min=0)[:, None] + torch.arange(chunk_size, device=slots.device)
    chunk_block = block_table[request[:, None], of_chunk // block_size].long()

    per_request = segments_of(step.max_query_len, window_size)
    window = (starts // window_size)[:, None] + torch.arange(per_request, device=slots.device)  # [R, S]
    low = torch.maximum(window * window_size, starts[:, None])
    high = torch.minimum((window + 1) * window_size, ends[:, None])
    segment_rows = (high - low).clamp(min=0).flatten()
    tokens = torch.where(high > low, high - window * window_size, 0)
    segment_start = torch.zeros(segment_rows.numel() + 1, dtype=torch.int32, device=slots.device)
    torch.cumsum(segment_rows, 0, dtype=torch.int32, out=segment_start[1:])
    per_window = window_size // block_size
    column = (window[..., None] * per_window + torch.arange(per_window, device=slots.device)).flatten(1)
    window_blocks = block_table.gather(1, column.clamp(max=block_table.shape[1] - 1)).view(window.numel(), per_window)
    return EvaPlan(
        window_size=window_size,
        chunk_size=chunk_size,
        token_block=slots // block_size,
        token_offset=slots % block_size,
        chunk_block=torch.where(chunk[:, None] >= 0, chunk_block, 0),
        chunk_offset=of_chunk % block_size,
        block_table=block_table,
        segment_start=segment_start,
        segment_window=window.flatten(),
        segment_tokens=tokens.flatten().to(torch.int32),
        segment_chunks=torch.where(tokens > 0, window * (window_size // chunk_size), 0).flatten().to(torch.int32),
        window_blocks=window_blocks,
        segments_per_request=per_request,
        max_rows=min(step.max_query_len, window_size),
        max_seq_len=step.max_seq_len,
    )


def make_summary_plan(step: CommonAttentionMetadata, window_size: int, chunk_size: int, block_size: int) -> SummaryPlan:
    """Return the plan of the summaries of a step, with their block table; a block covers `block_size` tokens."""
    _, _, chunk, request = _completed_chunks(step, chunk_size)
    block_table, states, place = step.block_table_tensor, block_size // chunk_size, chunk.clamp(min=0)
    block = block_table[request, place // states].long()
    return SummaryPlan(
        chunk_block=torch.where(chunk >= 0, block, 0),
        chunk_state=place % states,
        block_table=block_table,
        segment_blocks=block_table.repeat_interleave(segments_of(step.max_query_len, window_size), dim=0),
    )


def _completed_chunks(step: CommonAttentionMetadata, chunk_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the length [R] of each request before and after the step, and the n chunks that it completes.

    A chunk is listed as its index [n], -1 after the last one, and its request [n]. n = T // C + R bounds their number:
    q rows complete at most q / C chunks and one that an earlier step began.
    """
    ends = step.seq_lens.long()
    starts = ends - (step.query_start_loc[1:] - step.query_start_loc[:-1])
    last = ends // chunk_size
    until = (last - starts // chunk_size).cumsum(0)
    candidate = torch.arange(step.num_actual_tokens // chunk_size + len(ends), device=ends.device)
    request = torch.searchsorted(until, candidate, right=True)
    is_real = request < len(ends)
    request = request.clamp(max=len(ends) - 1)
    chunk = last[request] - until[request] + candidate
    return starts, ends, torch.where(is_real, chunk, -1), request


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

    It runs on a CPU and on any platform without paged attention kernels. It waits for the device.
    """
    out = torch.zeros_like(query)
    starts, windows, tokens = (x.tolist() for x in (plan.segment_start, plan.segment_window, plan.segment_tokens))
    for index, (start, end) in enumerate(pairwise(starts)):
        if start == end:
            continue
        request, first = index // plan.segments_per_request, windows[index] * plan.window_size
        earlier = _gather(summaries, places.block_table[request], 0, first // plan.chunk_size)
        window = _gather(cache, plan.block_table[request], first, tokens[index])
        key, value = torch.cat([earlier, window], dim=1).to(query.dtype).chunk(2, dim=-1)
        mask = torch.ones(end - start, key.shape[1], dtype=torch.bool, device=cache.device)
        mask, rows = mask.tril(key.shape[1] - (end - start)), slice(start, end)
        out[rows] = F.scaled_dot_product_attention(query[rows].transpose(0, 1), key, value, mask).transpose(0, 1)
    return out


def _gather(cache: Tensor, blocks: Tensor, start: int, count: int) -> Tensor:
    """Return entries [start, start + count) of a request from a paged cache, [H, count, 2D]."""
    per_block = cache.shape[2]
    first = start // per_block
    pages = cache[blocks[first : -(-(start + count) // per_block)].long()]  # [P, H, N, 2D]
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
