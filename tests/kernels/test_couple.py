"""The kernel that accepts coupled drafts against its definition: interpreted on a CPU, natively on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from tests.support import interpreted
from tests.support.kernel_cases import ACCEPTED, rows
from vllm_mtpc.kernels.couple import naive

NO_TRITON = "triton is not installed: only the PyTorch definitions can be tested here (pip install triton)"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NO_TRITON)


@pytest.fixture(scope="module")
def outputs() -> dict[str, tuple[Tensor, Tensor]]:
    return interpreted.run(ACCEPTED, functions={"couple": "accept"})


@pytest.mark.parametrize("name", list(ACCEPTED))
def test_accept_equals_its_definition(name: str, outputs: dict[str, tuple[Tensor, Tensor]]) -> None:
    (kept, count), wanted = outputs[name], naive.accept(*ACCEPTED[name][1])
    assert torch.equal(kept, wanted[0]) and torch.equal(count, wanted[1])
    assert kept.dtype == torch.int64 and count.dtype == torch.int32


def test_others_keep_what_they_have(outputs: dict[str, tuple[Tensor, Tensor]]) -> None:
    (kept, count), (alone, _) = outputs["next to others"], naive.accept(*rows(30, 8))
    assert (kept[::3] == 7).all() and (count[::3] == 7).all() and torch.equal(kept[1::3], alone[1::3])


def test_what_is_tested_varies() -> None:
    counts = naive.accept(*ACCEPTED["8"][1])[1]
    assert set(range(5)) <= set(counts.tolist())
    assert naive.accept(*ACCEPTED["all right"][1])[1].tolist() == [4, 4]
