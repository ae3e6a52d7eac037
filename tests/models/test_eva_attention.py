"""EVA attention over pages without an engine: the plan of a step, and both implementations of the attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_mtpc.models import hooks
from vllm_mtpc.models.evabyte import attend as module
from vllm_mtpc.models.evabyte import vllm_model as attention
from vllm_mtpc.models.evabyte.attend import (
    EvaPlan,
    SummaryPlan,
    attend,
    attend_paged,
    make_plan,
    make_summary_plan,
    write_summaries,
    write_tokens,
)  # fmt: skip
from vllm_mtpc.models.evabyte.config import GPU_BLOCK
from vllm_mtpc.models.evabyte.vllm_model import EvaPlanBuilder, SummaryPlanBuilder

WINDOW, CHUNK, HEADS, SIZE = 32, 4, 2, 8
BLOCK, LONGEST = 16, 112  # of summaries, in tokens; positions at most
# tokens in a block of tokens: 16 in the same block table; fewer in another table; less than a chunk
TOKEN_BLOCKS = [16, 4, 2]
# (positions before this step, rows of this step): a decode, drafts across a window, a prompt over three windows, a
# request that completes its window exactly, and a row of padding
REQUESTS = ((40, 1), (28, 8), (10, 70), (60, 4), (0, 0))


def common_of(
    requests: Sequence[tuple[int, int]], table: Tensor, num_rows: int, block: int = BLOCK
) -> CommonAttentionMetadata:
    """A step of requests (positions before it, rows), padded to num_rows."""
    slots = [
        int(table[request, position // block]) * block + position % block
        for request, (start, count) in enumerate(requests)
        for position in range(start, start + count)
    ]
    rows = torch.tensor([count for _, count in requests])
    ends = torch.tensor([start + count for start, count in requests], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)]).int()
    slot_mapping = torch.tensor(slots + [-1] * (num_rows - len(slots)))
    tensors = {"query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens": ends, "slot_mapping": slot_mapping}
    sizes = {"num_reqs": len(requests), "num_actual_tokens": num_rows}
    sizes |= {"max_query_len": int(rows.max()), "max_seq_len": int(ends.max())}
    return CommonAttentionMetadata(block_table_tensor=table[: len(requests)], **tensors, **sizes)


def make_step(token_block: int = BLOCK, pad: int = 3) -> tuple[EvaPlan, SummaryPlan]:
    generator = torch.Generator().manual_seed(0)

    def make_table(block: int) -> Tensor:
        columns = LONGEST // block
        return torch.randperm(5 * columns + 5, generator=generator)[: 5 * columns].view(5, columns).int() + 1

    far = make_table(BLOCK)
    near = far if token_block == BLOCK else make_table(token_block)
    num_rows = sum(count for _, count in REQUESTS) + pad
    step = replace(common_of(REQUESTS, near, num_rows, token_block), max_seq_len=LONGEST)
    sizes = {"window_size": WINDOW, "chunk_size": CHUNK}
    plan = make_plan(step, block_size=token_block, **sizes)
    return plan, make_summary_plan(replace(step, block_table_tensor=far), block_size=BLOCK, **sizes)


def make_caches(plan: EvaPlan, places: SummaryPlan) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, H, D] and both caches, with the summary of every complete chunk."""
    generator = torch.Generator().manual_seed(1)
    near, far = int(plan.block_table.max()) + 1, int(places.block_table.max()) + 1
    cache = torch.randn(near, HEADS, WINDOW // plan.window_blocks.shape[1], 2 * SIZE, generator=generator)
    summaries = torch.randn(far, HEADS, BLOCK // CHUNK, 2 * SIZE, generator=generator)
    query = torch.randn(len(plan.token_block), HEADS, SIZE, generator=generator)
    return query, cache, summaries


def attention_by_rows(query: Tensor, cache: Tensor, summaries: Tensor, plan: EvaPlan, places: SummaryPlan) -> Tensor:
    """The definition, row by row and entry by entry."""
    out = torch.zeros_like(query)
    row, block = 0, cache.shape[2]
    for request, (start, count) in enumerate(REQUESTS):
        near, far = plan.block_table[request].tolist(), places.block_table[request].tolist()
        for t in range(start, start + count):
            first = t // WINDOW * WINDOW
            entries = [summaries[far[c * CHUNK // BLOCK], :, c % (BLOCK // CHUNK)] for c in range(first // CHUNK)]
            entries += [cache[near[j // block], :, j % block] for j in range(first, t + 1)]
            seen = torch.stack(entries, 1).double()  # [H, L, 2D]
            scores = (seen[..., :SIZE] @ query[row, :, :, None].double())[..., 0] * SIZE**-0.5
            out[row] = (scores.softmax(-1)[:, None] @ seen[..., SIZE:])[:, 0].float()
            row += 1
    return out


@pytest.mark.parametrize("token_block", TOKEN_BLOCKS)
def test_attention_in_torch_equals_its_definition(token_block: int) -> None:
    plans = make_step(token_block)
    step = make_caches(*plans)
    # float32 against float64 over at most 60 entries
    torch.testing.assert_close(attend(*step, *plans), attention_by_rows(*step, *plans), rtol=1e-5, atol=1e-6)


def paged_attention(
    q, k, v, cu_seqlens_q, seqused_k, block_table, causal, softmax_scale, max_seqlen_q, max_seqlen_k, return_softmax_lse
) -> tuple[Tensor, Tensor]:
    """FlashAttention over pages [blocks, N, H, D] in PyTorch: (out, lse [H, T]); causal from the last row."""
    assert return_softmax_lse
    assert block_table.dtype == seqused_k.dtype == cu_seqlens_q.dtype == torch.int32
    out, lse = torch.full_like(q, float("nan")), torch.full((q.shape[1], len(q)), float("inf"))
    starts = cu_seqlens_q.tolist()
    for index, (start, end) in enumerate(pairwise(starts)):
        length, rows = int(seqused_k[index]), end - start
        assert rows <= max_seqlen_q and length <= max_seqlen_k
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
def test_merged_paged_calls_equal_the_definition(swap: bool, token_block: int) -> None:
    plans = make_step(token_block, pad=0)
    step = make_caches(*plans)

    def flash(**arguments: Any) -> tuple[Tensor, Tensor]:
        if swap:  # a fault: the causal masks of both calls exchanged
            arguments["causal"] = not arguments["causal"]
        return paged_attention(**arguments)

    merged = attend_paged(*step, *plans, flash)
    # merging adds two exponentials and a division in float32
    is_close = torch.allclose(merged, attention_by_rows(*step, *plans), rtol=1e-4, atol=1e-5)
    assert is_close is not swap


ROWS, SEQS = 3, 4  # rows of a request that decodes, requests of the graph
SIZES = SimpleNamespace(window_size=WINDOW, chunk_size=CHUNK)
CONFIG = SimpleNamespace(
    model_config=SimpleNamespace(hf_config=SIZES, max_model_len=LONGEST),
    speculative_config=SimpleNamespace(num_speculative_tokens=ROWS - 1),
    scheduler_config=SimpleNamespace(max_num_seqs=SEQS),
)


def run_step(plan: EvaPlan, places: SummaryPlan, caches: list[Tensor], rows: list[Tensor]) -> Tensor:
    """The part of a layer's step that a graph holds, with query, key, value [T, H, D]."""
    query, key, value = rows
    write_tokens(caches[0], key, value, plan)
    write_summaries(caches[1], caches[0], *(torch.full((HEADS, SIZE), value) for value in (0.3, -0.2)), plan, places)
    return attend_paged(query, *caches, plan, places, paged_attention)


def test_captured_plan_is_refilled_by_every_step_but_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts in one window and across two, and padding."""
    monkeypatch.setattr(attention, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    spec, device = SimpleNamespace(block_size=BLOCK), torch.device("cpu")
    builders = [make(spec, ["layer"], CONFIG, device) for make in (EvaPlanBuilder, SummaryPlanBuilder)]
    table = torch.zeros(SEQS, LONGEST // BLOCK, dtype=torch.int32)  # vLLM's, at a fixed address
    first_step = common_of([(0, ROWS)] * SEQS, table, ROWS * SEQS)
    builders[0].build(0, replace(first_step, max_query_len=ROWS + 1))
    assert not builders[0].buffers  # the plan of a prompt uses none
    captured = [builder.build_for_cudagraph_capture(first_step) for builder in builders]
    assert captured[0].max_seq_len == LONGEST  # or a graph captured with short texts would not read summaries
    generator = torch.Generator().manual_seed(4)
    table += torch.randperm(table.numel(), generator=generator).view_as(table) + 1
    blocks = table.numel() + 1
    first = torch.randn(blocks, HEADS, BLOCK, 2 * SIZE, generator=generator)
    second = torch.randn(blocks, HEADS, BLOCK // CHUNK, 2 * SIZE, generator=generator)
    for positions in ([40, 30, 5, 61], [63, 95], [7], [33, 31, 94]):
        requests, real = [(position, ROWS) for position in positions], len(positions)
        padded = common_of(requests + [(0, 0)] * (SEQS - real), table, ROWS * SEQS)
        rows = [torch.randn(ROWS * SEQS, HEADS, SIZE, generator=generator) for _ in range(3)]
        kept = [builder.build(0, padded) for builder in builders]
        for made, held in zip(kept, captured, strict=True):
            for name, value in vars(held).items():
                if isinstance(value, Tensor):
                    same = getattr(made, name)
                    assert same.data_ptr() == value.data_ptr() and same.shape == value.shape
        replayed = [first.clone(), second.clone()]
        out = run_step(*captured, replayed, rows)

        own = common_of(requests, table, ROWS * real)
        wanted = [first.clone(), second.clone()]
        plans = [builder.plan(replace(own, max_seq_len=LONGEST)) for builder in builders]
        expected = run_step(*plans, wanted, [part[: ROWS * real] for part in rows])
        assert torch.equal(out[: ROWS * real], expected), positions
        for cache, same in zip(replayed, wanted, strict=True):
            assert torch.equal(cache[1:], same[1:]), positions  # block 0: padding


@pytest.mark.parametrize(
    "is_cuda, dtype, window, block, frees, supported",
    [
        (True, torch.bfloat16, 2048, GPU_BLOCK, True, "UNIFORM_BATCH"),
        (True, torch.bfloat16, 2048, GPU_BLOCK, False, "UNIFORM_BATCH"),
        (False, torch.bfloat16, 2048, GPU_BLOCK, True, "NEVER"),
        (True, torch.float32, 2048, GPU_BLOCK, True, "NEVER"),
        (True, torch.bfloat16, 2048, 128, False, "NEVER"),  # pages of 8 summaries
        (True, torch.bfloat16, 128, GPU_BLOCK, False, "NEVER"),  # windows inside a block
    ],
)
def test_graphs_are_supported_where_flash_attention_reads_both_caches(
    monkeypatch, is_cuda: bool, dtype: torch.dtype, window: int, block: int, frees: bool, supported: str
) -> None:
    monkeypatch.setattr(module, "current_platform", SimpleNamespace(is_cuda=lambda: is_cuda))
    config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(window_size=window, chunk_size=16)),
        cache_config=SimpleNamespace(block_size=block),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not frees),
        speculative_config=None,
        kv_transfer_config=None,
    )
    for builder in (EvaPlanBuilder, SummaryPlanBuilder):
        assert builder.get_cudagraph_support(config, SimpleNamespace(dtype=dtype)).name == supported


@pytest.mark.parametrize(
    "given, made", [(None, "FULL_DECODE_ONLY"), ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"), ("NONE", "NONE")]
)
def test_decode_steps_have_graphs_unless_disabled(monkeypatch, given: str | None, made: str) -> None:
    for name in ("check_limits", "_check_caches"):
        monkeypatch.setattr(hooks, name, lambda *args: None)
    compilation = SimpleNamespace(cudagraph_mode=given and CUDAGraphMode[given], splitting_ops=None)
    hooks.EvaByteHook.verify_and_update_config(SimpleNamespace(compilation_config=compilation))
    assert compilation.cudagraph_mode.name == made
    assert compilation.splitting_ops == [torch.ops.vllm.mtpc_eva_attention._qualified_op_name]
