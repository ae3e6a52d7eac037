"""The plan of a step, which all EVA layers share: PyTorch, without synchronisation with the host.

A request's positions are divided into chunks of C positions with one summary each, and into windows of W positions. A
row at position t attends to the tokens of its own window up to t, and to the summaries of all chunks of earlier
windows. So a request's rows are divided into *segments*, one per window, whose rows attend to the same summaries.

After a rejected draft the next step starts at its position, writes its slot again and computes the summary of every
chunk that it completes again. Until then no row reads the stale summary, because the chunk's window is not finished.

Tokens and summaries have one block table or two (`window.py`), so each has a plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata


class Segment(NamedTuple):
    """Rows [row, row + num_rows) of a request, whose last row attends to `tokens` positions of window `window`."""

    request: int
    row: int
    num_rows: int
    window: int
    tokens: int


@dataclass(frozen=True)
class EvaPlan:
    """Plan of the tokens: R requests, T rows (padding included), n chunk candidates, S segments for each request.

    Padding rows and candidates after the last chunk have block 0, which vLLM gives to no request. Tensors are int64
    unless noted.
    """

    window_size: int
    chunk_size: int
    block_size: int
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

    def segments(self) -> list[Segment]:
        """Return the segments that have rows; waits for the device."""
        starts = self.segment_start.tolist()
        rows = zip(pairwise(starts), self.segment_window.tolist(), self.segment_tokens.tolist(), strict=True)
        return [
            Segment(index // self.segments_per_request, start, end - start, window, tokens)
            for index, ((start, end), window, tokens) in enumerate(rows)
            if end > start
        ]


@dataclass(frozen=True)
class SummaryPlan:
    """Plan of the summaries, whose block table and block size may differ from the tokens'."""

    states: int  # summaries in a block
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
        block_size=block_size,
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
        states=states,
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
