"""Groups of auxiliary rows: the best sizes, their number by batch size, their rows, and their KV blocks."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.plan.row_groups import Bucket, Plan, choose_groups, merged_plan, two_pass_plan
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


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data(), block_size=st.sampled_from([2, 4, 16]))
def test_groups_read_their_prefix_and_write_to_own_blocks(data: st.DataObject, block_size: int) -> None:
    """A KV cache of integers: groups read their prefix and their own rows, requests keep theirs."""
    width, groups, rows = 4, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    plan = Plan((Bucket(groups, (rows,)),), leading=0)
    per_group, num_blocks = plan.blocks_per_group(block_size), groups * width
    assert plan.num_blocks(block_size) == groups * per_group
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

    monkeypatch.setattr(module.HeadSpeculator, "set_attn", lambda *args: None)
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


def independent(p: float, drafts: int) -> list[float]:
    """Every draft is right with probability p, whatever the others are."""
    return [p**g * (1 - p) for g in range(drafts)] + [p**drafts]


def expected(accepted: np.ndarray, sizes: tuple[int, ...], variant: str) -> float:
    """Tokens per step of a table by the powers of its chain over v, from the first step of a request on."""
    drafts = len(sizes) - 1
    after = [max(0, size - (variant == "o-ptp")) for size in sizes]
    survival = [accepted[g:].sum() for g in range(drafts + 1)]
    step = np.zeros((drafts + 1, drafts + 1))
    for v in range(drafts + 1):
        for d in range(v + 1):
            step[v, after[d]] += survival[v] if d == v else survival[d] - survival[d + 1]
    often = np.linalg.matrix_power(step, 2**14)[after[0]]
    return float(often @ np.cumsum(survival))


@pytest.mark.parametrize("variant", ["o-ptp", "c-ptp"])
@pytest.mark.parametrize(("drafts", "budget"), [(1, 2), (2, 3), (2, 5), (3, 4), (3, 6), (3, 10)])
def test_table_is_the_best_of_all(variant: str, drafts: int, budget: int) -> None:
    """Three distributions each. A search, so a miss of 1 % is allowed; two of three are exact."""
    random = np.random.default_rng(drafts * 100 + budget)
    most, exact = drafts + (variant == "o-ptp"), 0
    for concentration in (0.3, 1.0, 3.0):
        accepted = random.dirichlet(np.full(drafts + 1, concentration))
        table = choose_groups(accepted, drafts, budget, variant)
        assert sum(table.sizes) <= budget and max(table.sizes) <= most
        all_sizes = (s for s in itertools.product(range(most + 1), repeat=drafts + 1) if sum(s) <= budget)
        best = max(expected(accepted, sizes, variant) for sizes in all_sizes)
        assert table.expected_tokens == pytest.approx(expected(accepted, table.sizes, variant), abs=1e-6)
        assert 0.99 * best <= table.expected_tokens <= best + 1e-6
        exact += table.expected_tokens > best - 1e-6
    assert exact >= 2


def test_tables_of_known_distributions() -> None:
    """Independent drafts, p = 0.7, at most 19: two passes give 3.33; 90 rows gave the authors' greedy choice 3.15."""
    distribution = independent(0.7, 19)
    values = [choose_groups(distribution, 19, budget, "o-ptp").expected_tokens for budget in (20, 40, 90, 200, 400)]
    assert values == sorted(values)
    assert 3.15 <= values[2] <= 3.33
    assert values[-1] == pytest.approx(sum(0.7**g for g in range(20)), abs=1e-6)  # as many rows as are of use
    assert choose_groups(distribution, 19, 1, "o-ptp").sizes == (0,) * 20  # a row alone drafts nothing
    assert choose_groups(distribution, 19, 1, "c-ptp").sizes == (1,) + (0,) * 19
    always, few = (choose_groups([0.0, 0.0, 0.0, 1.0], 3, rows, "c-ptp") for rows in (100, 6))
    assert always.sizes == (3, 3, 3, 3)
    assert [always.expected_tokens, few.expected_tokens] == pytest.approx([4, 4])


def test_batches_share_the_rows() -> None:
    distribution = independent(0.8, 7)
    config = head("o-ptp", 8, distribution)
    plan = merged_plan(config, 7, max_num_seqs=20, max_aux_rows=128)
    assert [bucket.max_batch for bucket in plan.buckets] == [2, 4, 8, 16, 20]  # 1 and 2 have all rows of use
    assert all(batch * sum(sizes) <= 128 for batch, sizes in plan.buckets)
    values = [expected(np.array(distribution), sizes, "o-ptp") for _, sizes in plan.buckets]
    assert values == sorted(values, reverse=True) and plan.buckets[0].sizes == (8,) * 8
    assert all(bucket.rows <= 10 for bucket in merged_plan(config, 7, 8, 128, rows_per_request=10).buckets)
    assert merged_plan(config, 7, 256, 256).bucket(256) is None  # too large a batch to draft for
