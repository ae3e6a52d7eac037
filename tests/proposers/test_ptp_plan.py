"""Groups of auxiliary rows: their number by batch size, their rows, and their KV blocks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.plan.row_groups import Bucket, Plan, merged_plan, two_pass_plan
from vllm_mtpc.proposers.v2.ptp.groups import GroupBlocks, Layout

CPU = torch.device("cpu")
TARGET = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"]}


def head(variant: str, window: int = 8, accepted: list[float] | None = None) -> PtpConfig:
    return PtpConfig.create(variant=variant, window=window, target=TARGET, verifier="target", accepted=accepted)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    variant=st.sampled_from(["o-ptp", "c-ptp"]),
    drafts=st.integers(1, 7),
    seqs=st.integers(1, 70),
    rows=st.integers(2, 300),
    merged=st.booleans(),
)
def test_plan_keeps_to_max_aux_rows(variant: str, drafts: int, seqs: int, rows: int, merged: bool) -> None:
    plan = (merged_plan if merged else two_pass_plan)(head(variant), drafts, seqs, rows)
    for num_reqs in range(1, seqs + 1):
        bucket = plan.bucket(num_reqs)
        if bucket is None:
            assert all(bucket.max_batch < num_reqs for bucket in plan.buckets)
            continue
        # a batch below its bucket's size never has more rows than the bucket's largest one
        assert num_reqs * (bucket.rows + plan.leading) <= max(rows, 2)
        assert num_reqs * len(bucket.groups) <= plan.max_groups
        assert num_reqs * (bucket.rows + plan.leading) <= plan.max_rows
        assert max(bucket.sizes) + plan.leading <= plan.max_group_rows
        if merged:
            assert len(bucket.sizes) == drafts + 1


def test_large_batches_draft_less() -> None:
    plan = merged_plan(head("o-ptp"), 7, 64, 64)
    rows = [plan.bucket(size).rows for size in (1, 4, 16)]
    assert rows == sorted(rows, reverse=True) and rows[0] > rows[-1]
    assert plan.bucket(64) is None  # one row a request drafts nothing


def test_blocks_hold_the_longest_group() -> None:
    plan = Plan((Bucket(2, (5, 0, 3)),), leading=1)
    assert plan.max_groups == 4 and plan.max_group_rows == 6
    for block_size in (1, 2, 4, 16, 128):
        needed = max((start + 5) // block_size for start in range(block_size)) + 1
        assert plan.blocks_per_group(block_size) == needed
        assert plan.num_blocks(block_size) == 4 * needed


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), block_size=st.sampled_from([2, 4, 16]))
def test_groups_read_their_prefix_and_write_to_own_blocks(data: st.DataObject, block_size: int) -> None:
    """A KV cache of integers: groups read their prefix and their own rows, requests keep theirs."""
    width, groups, rows = 4, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    per_group = -(-(block_size - 1 + rows) // block_size)
    num_blocks = groups * width
    cache = torch.arange((num_blocks + groups * per_group) * block_size).view(-1, block_size)
    before = cache.clone()
    scratch = GroupBlocks(num_blocks + torch.arange(groups * per_group).view(groups, -1), block_size, width)
    prefix = torch.tensor(data.draw(st.lists(st.integers(1, width * block_size), min_size=groups, max_size=groups)))
    tables = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).view(groups, width).int()
    own, source, target = scratch.fill_tables(prefix, tables)
    cache[target] = cache[source]
    at = prefix[:, None] + torch.arange(rows)
    group = torch.arange(groups)[:, None].expand_as(at)
    slots = scratch.slots(group, prefix[:, None], at)
    cache.view(-1)[slots.flatten()] = -1 - torch.arange(groups * rows)
    assert slots.unique().numel() == slots.numel()
    assert torch.equal(cache[:num_blocks], before[:num_blocks])
    for index, length in enumerate(prefix.tolist()):
        seen = cache[own[index].long()].flatten()[: length + rows]
        assert torch.equal(seen[:length], before[tables[index].long()].flatten()[:length])
        assert torch.equal(seen[length:], -1 - torch.arange(index * rows, (index + 1) * rows))


def test_layout_has_the_bucket_sizes() -> None:
    layout = Layout.create(Bucket(4, (3, 0, 2)), CPU)
    assert layout.accepted.tolist() == [0, 2]
    assert layout.group.tolist() == [0, 0, 0, 1, 1]
    assert layout.offset.tolist() == [0, 1, 2, 0, 1]
    accepted = torch.tensor([0, 1])
    assert layout.find_group(accepted)[1].tolist() == [3, 0]
    assert layout.find_group(torch.tensor([2, 0]))[0].tolist() == [3, 0]


@pytest.mark.parametrize("max_num_seqs", [1, 32, 254, 1024])
def test_reserved_blocks_lie_in_vllms_profiling_cache(max_num_seqs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM measures graphs in a cache with a block per sequence, 512 at most."""
    from vllm_mtpc.proposers.v2.ptp import ptp_speculator as module

    monkeypatch.setattr(module.DraftModelSpeculator, "set_attn", lambda *args: None)
    monkeypatch.setattr(module, "init_attn_backend", lambda *args: ([], None, None))
    for name in ("check_attention", "replace_attributes"):
        monkeypatch.setattr(module, name, lambda *args, **kwargs: SimpleNamespace())
    made = object.__new__(module.PtpSpeculator)
    made.plan = two_pass_plan(head("o-ptp"), 7, max_num_seqs, 256)
    config = SimpleNamespace(scheduler_config=None, compilation_config=None)
    made.vllm_config, made.max_num_reqs, made.device = config, max_num_seqs, CPU
    tables = SimpleNamespace(block_sizes=[16], input_block_tables=[torch.zeros(max_num_seqs, 4)])
    reserved = made.plan.num_blocks(16)
    for num_blocks in (min(max_num_seqs, 512), 5000):
        made.set_attn(None, SimpleNamespace(num_blocks=num_blocks), tables)
        assert int(made.group_blocks.own.min()) >= 0 and int(made.group_blocks.own.max()) < num_blocks
    assert made.group_blocks.own.flatten().tolist() == list(range(5000 - reserved, 5000))
