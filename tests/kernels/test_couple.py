"""The kernel that accepts coupled drafts against its definition: interpreted on a CPU, natively on a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import interpreted
from vllm_mtpc.kernels.couple import naive

NO_TRITON = "triton is not installed: only the PyTorch definitions can be tested here (pip install triton)"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NO_TRITON)


def batch(requests: int, width: int, draft_dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor, Tensor, int]:
    """Requests of 0 .. width rows and rows of padding behind; few tokens, so that drafts are right half of the time."""
    generator = torch.Generator().manual_seed(requests + width)
    rows = torch.randint(width + 1, (requests,), generator=generator)
    cu_num_logits = torch.cat([torch.zeros(1, dtype=torch.long), rows.cumsum(0)]).int()
    total = int(rows.sum()) + 3
    tokens, drafts = torch.randint(2, (2, total), generator=generator)
    drafts[::11] = -1
    return tokens, drafts.to(draft_dtype), cu_num_logits, width


def beside_others(requests: int, width: int) -> tuple[Any, ...]:
    """Two of three are coupled; the others keep 7, 7, ..."""
    others = (torch.arange(requests) % 3 > 0, torch.full((requests, width), 7), torch.full((requests,), 7).int())
    return (*batch(requests, width), others)


CASES: dict[str, interpreted.Case] = {
    "8": ("couple", batch(60, 8)),
    "2, int32": ("couple", batch(20, 2, torch.int32)),
    "17": ("couple", batch(40, 17)),
    "1": ("couple", batch(5, 1)),
    "beside others": ("couple", beside_others(30, 8)),
    "no requests": ("couple", batch(0, 4)),
    "all right": ("couple", (torch.ones(9, dtype=torch.long), torch.ones(9), torch.tensor([0, 4, 8]), 4)),
}


@pytest.fixture(scope="module")
def outputs() -> dict[str, tuple[Tensor, Tensor]]:
    return interpreted.run(CASES, functions={"couple": "accept"})


@pytest.mark.parametrize("name", list(CASES))
def test_accept_equals_its_definition(name: str, outputs: dict[str, tuple[Tensor, Tensor]]) -> None:
    (kept, count), wanted = outputs[name], naive.accept(*CASES[name][1])
    assert torch.equal(kept, wanted[0]) and torch.equal(count, wanted[1])
    assert kept.dtype == torch.int64 and count.dtype == torch.int32


def test_others_keep_what_they_have(outputs: dict[str, tuple[Tensor, Tensor]]) -> None:
    (kept, count), (alone, _) = outputs["beside others"], naive.accept(*batch(30, 8))
    assert (kept[::3] == 7).all() and (count[::3] == 7).all() and torch.equal(kept[1::3], alone[1::3])


def test_what_is_tested_varies() -> None:
    counts = naive.accept(*CASES["8"][1])[1]
    assert set(range(5)) <= set(counts.tolist())
    assert naive.accept(*CASES["all right"][1])[1].tolist() == [4, 4]
