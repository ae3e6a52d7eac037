"""The replacement of vLLM's CPU expand kernel."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtpc.proposers.patches.vllm_patches import expand, expand_batch_to_tokens, is_broken

DTYPES = [torch.float32, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, derandomize=True, max_examples=50)
@given(rows=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=8))
def test_expand(dtype: torch.dtype, rows: list[tuple[int, int]]) -> None:
    x = torch.tensor([value for value, _ in rows], dtype=dtype)
    counts = torch.tensor([count for _, count in rows])
    total = int(counts.sum())
    wanted = [7 if value == 3 else value for value, count in rows for _ in range(count)]
    got = expand(x, counts.cumsum(0).int(), total, replace_from=3, replace_to=7)
    assert got.dtype == dtype and got.tolist() == wanted
    kept = expand(x, counts.cumsum(0).int(), total)
    assert kept.tolist() == [value for value, count in rows for _ in range(count)]


def test_a_kernel_that_fills_a_copy_is_found() -> None:
    def broken(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        return x.new_zeros(num_tokens)  # what the output held before

    assert is_broken(broken) and not is_broken(expand)
    mended = expand_batch_to_tokens.replace(broken)(torch.tensor([0.5, 2.0]), torch.tensor([2, 3]), 3)
    assert mended.tolist() == [0.5, 0.5, 2.0]


def test_a_working_kernel_is_kept() -> None:
    calls = []

    def working(*args):
        calls.append(args)
        return expand(*args)

    assert expand_batch_to_tokens.replace(working)(torch.tensor([0.5]), torch.tensor([2]), 2).tolist() == [0.5, 0.5]
    assert len(calls) == 2  # tried out, then used
