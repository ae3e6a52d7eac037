"""EVA attention over pages, without an engine: the plan of a step, and the two ways to attend."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_mtpc.models.evabyte import paged
from vllm_mtpc.models.evabyte.attend import attend, summarise, write_summaries, write_tokens
from vllm_mtpc.models.evabyte.plan import EvaPlan, Segment, SummaryPlan, make_plan, make_summary_plan

WINDOW, CHUNK, HEADS, SIZE = 32, 4, 2, 8
BLOCK = 16  # of summaries, in tokens
# tokens in a block of tokens: as many, in the same block table; fewer, in a table of their own; less than a chunk
TOKEN_BLOCKS = [16, 4, 2]
# (positions before this step, rows of this step): a decode, drafts across a window, a prompt over three windows, a
# request that completes its window exactly, and a row of padding
REQUESTS = ((40, 1), (28, 8), (10, 70), (60, 4), (0, 0))


def make_step(token_block: int = BLOCK, pad: int = 3) -> tuple[EvaPlan, SummaryPlan]:
    rows = torch.tensor([rows for _, rows in REQUESTS])
    ends = torch.tensor([start + rows for start, rows in REQUESTS], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)

    def make_table(block: int) -> Tensor:
        columns = 7 * BLOCK // block
        return torch.randperm(5 * columns + 5, generator=generator)[: 5 * columns].view(5, columns).int() + 1

    far = make_table(BLOCK)
    near = far if token_block == BLOCK else make_table(token_block)
    slots = [
        int(near[request, position // token_block]) * token_block + position % token_block
        for request, (start, count) in enumerate(REQUESTS)
        for position in range(start, start + count)
    ]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)]).int()
    slot_mapping = torch.tensor(slots + [-1] * pad)
    sizes = {"window_size": WINDOW, "chunk_size": CHUNK, "block_size": token_block}
    plan = make_plan(starts, ends, near, slot_mapping, int(rows.max()), 112, **sizes)
    places = make_summary_plan(starts, ends, far, len(slot_mapping), chunk_size=CHUNK, block_size=BLOCK)
    return plan, places


def make_caches(plan: EvaPlan, places: SummaryPlan) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, H, D] and the two caches, every summary of a complete chunk in place."""
    generator = torch.Generator().manual_seed(1)
    near, far = int(plan.block_table.max()) + 1, int(places.block_table.max()) + 1
    cache = torch.randn(near, HEADS, plan.block_size, 2 * SIZE, generator=generator)
    summaries = torch.randn(far, HEADS, places.states, 2 * SIZE, generator=generator)
    query = torch.randn(len(plan.token_block), HEADS, SIZE, generator=generator)
    return query, cache, summaries


def test_segments() -> None:
    assert make_step()[0].segments() == [
        Segment(request=0, row=0, num_rows=1, window=1, tokens=9),
        Segment(request=1, row=1, num_rows=4, window=0, tokens=32),
        Segment(request=1, row=5, num_rows=4, window=1, tokens=4),
        Segment(request=2, row=9, num_rows=22, window=0, tokens=32),
        Segment(request=2, row=31, num_rows=32, window=1, tokens=32),
        Segment(request=2, row=63, num_rows=16, window=2, tokens=16),
        Segment(request=3, row=79, num_rows=4, window=1, tokens=32),
    ]


@pytest.mark.parametrize("token_block", TOKEN_BLOCKS)
def test_chunks_that_a_step_completes(token_block: int) -> None:
    plan, places = make_step(token_block)
    written = zip(
        places.chunk_block.tolist(),
        places.chunk_state.tolist(),
        plan.chunk_block.tolist(),
        plan.chunk_offset.tolist(),
        strict=True,
    )
    found = [entry for entry in written if entry[0]]  # block 0 is nobody's
    completed = [
        (request, chunk * CHUNK)
        for request, (start, count) in enumerate(REQUESTS)
        for chunk in range(start // CHUNK, (start + count) // CHUNK)
    ]
    wanted = [
        (
            int(places.block_table[request, first // BLOCK]),
            first % BLOCK // CHUNK,
            [int(plan.block_table[request, j // token_block]) for j in range(first, first + CHUNK)],
            [j % token_block for j in range(first, first + CHUNK)],
        )
        for request, first in completed
    ]
    assert found == wanted
    assert len(wanted) == 0 + 2 + 18 + 1


@pytest.mark.parametrize("token_block", TOKEN_BLOCKS)
def test_writes_reach_their_places_and_no_others(token_block: int) -> None:
    plan, places = make_step(token_block)
    query, cache, summaries = make_caches(plan, places)
    before, summaries_before = cache.clone(), summaries.clone()
    key, value = torch.randn_like(query), torch.randn_like(query)
    mu, phi = torch.randn(2, HEADS, SIZE)
    write_tokens(cache, key, value, plan)
    write_summaries(summaries, cache, mu, phi, plan, places)

    def token(tokens: Tensor, position: int) -> Tensor:  # of the third request
        return tokens[int(plan.block_table[2, position // token_block]), :, position % token_block]

    row = 9  # the first row of the third request is its position 10
    torch.testing.assert_close(token(cache, 10), torch.cat([key[row], value[row]], -1), rtol=0, atol=0)
    for position in range(10):
        torch.testing.assert_close(token(cache, position), token(before, position), rtol=0, atol=0)
    chunk = torch.stack([token(cache, position) for position in range(8, 12)])[None]  # 8 and 9: of an earlier step
    block = int(places.block_table[2, 0])
    torch.testing.assert_close(summaries[block, :, 2], summarise(chunk, mu, phi)[0], rtol=0, atol=0)
    untouched = [b for b in range(1, len(summaries)) if b not in places.chunk_block.tolist()]
    torch.testing.assert_close(summaries[untouched], summaries_before[untouched], rtol=0, atol=0)


def written_down(query: Tensor, cache: Tensor, summaries: Tensor, plan: EvaPlan, places: SummaryPlan) -> Tensor:
    """Row by row and entry by entry."""
    out = torch.zeros_like(query)
    row = 0
    for request, (start, count) in enumerate(REQUESTS):
        near, far = plan.block_table[request].tolist(), places.block_table[request].tolist()
        for t in range(start, start + count):
            first = t // WINDOW * WINDOW
            entries = [summaries[far[c * CHUNK // BLOCK], :, c % (BLOCK // CHUNK)] for c in range(first // CHUNK)]
            entries += [cache[near[j // plan.block_size], :, j % plan.block_size] for j in range(first, t + 1)]
            seen = torch.stack(entries, 1).double()  # [H, L, 2D]
            scores = (seen[..., :SIZE] @ query[row, :, :, None].double())[..., 0] * SIZE**-0.5
            out[row] = (scores.softmax(-1)[:, None] @ seen[..., SIZE:])[:, 0].float()
            row += 1
    return out


@pytest.mark.parametrize("token_block", TOKEN_BLOCKS)
def test_attend_in_torch(token_block: int) -> None:
    plans = make_step(token_block)
    step = make_caches(*plans)
    # float32 against float64 over at most 60 entries
    torch.testing.assert_close(attend(*step, *plans), written_down(*step, *plans), rtol=1e-5, atol=1e-6)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    block_table: Tensor,
    causal: bool,
    softmax_scale: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
    return_softmax_lse: bool,
) -> tuple[Tensor, Tensor]:
    """What FlashAttention says it computes: pages [blocks, N, H, D]; causal from the last row; (out, lse [H, T])."""
    assert return_softmax_lse
    assert block_table.dtype == seqused_k.dtype == cu_seqlens_q.dtype == torch.int32
    out, lse = torch.full_like(q, float("nan")), torch.full((q.shape[1], len(q)), float("inf"))
    starts = cu_seqlens_q.tolist()
    for index, (start, end) in enumerate(pairwise(starts)):
        length, rows = int(seqused_k[index]), end - start
        assert rows <= max_seqlen_q
        assert length <= max_seqlen_k
        if rows == 0 or length == 0:
            out[start:end] = 0
            continue
        pages = block_table[index, : -(-length // k.shape[1])].long()
        key, value = (pool[pages].flatten(0, 1)[:length].transpose(0, 1) for pool in (k, v))
        scores = q[start:end].transpose(0, 1) @ key.transpose(1, 2) * softmax_scale
        if causal:
            is_seen = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
            scores = scores.masked_fill(~is_seen, float("-inf"))
        lse[:, start:end] = scores.logsumexp(-1)
        out[start:end] = (scores.softmax(-1) @ value).transpose(0, 1)
    return out, lse


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("token_block", TOKEN_BLOCKS)
def test_two_paged_calls_merged(swap: bool, token_block: int) -> None:
    plans = make_step(token_block, pad=0)
    step = make_caches(*plans)

    def flash(**arguments: Any) -> tuple[Tensor, Tensor]:
        if swap:  # a fault: the causal mask of the two calls exchanged
            arguments["causal"] = not arguments["causal"]
        return paged_attention(**arguments)

    merged = paged.attend(*step, *plans, flash, SIZE**-0.5)
    # merging adds two exponentials and a division in float32
    is_close = torch.allclose(merged, written_down(*step, *plans), rtol=1e-4, atol=1e-5)
    assert is_close is not swap


def test_where_flash_attention_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not paged.fits(torch.bfloat16, 2048, paged.BLOCK, 16)  # a CPU
    monkeypatch.setattr(paged, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    assert paged.fits(torch.bfloat16, 2048, paged.BLOCK, 16)
    assert paged.fits(torch.bfloat16, 2048, 16, 16)
    assert not paged.fits(torch.float32, 2048, 16, 16)
    assert not paged.fits(torch.bfloat16, 2048, 8, 8)  # pages of 8 entries
    assert not paged.fits(torch.bfloat16, 128, paged.BLOCK, 16)  # windows inside a block
