"""The kernel that accepts coupled drafts against its definition: interpreted on a CPU, natively on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support import interpreted
from tests.support.kernel_cases import ACCEPTED, rows
from vllm_mtpc.kernels.couple import naive


@pytest.fixture(scope="module")
def outputs() -> dict[str, tuple[Tensor, Tensor]]:
    return interpreted.run(ACCEPTED, functions={"couple": "accept"})


@pytest.mark.parametrize("name", list(ACCEPTED))
def test_accept_equals_its_definition(name: str, outputs: dict[str, tuple[Tensor, Tensor]]) -> None:
    (kept, count), wanted = outputs[name], naive.accept(*ACCEPTED[name][1])
    assert torch.equal(kept, wanted[0]) and torch.equal(count, wanted[1])
    assert kept.dtype == torch.int64 and count.dtype == torch.int32


def test_accept_keeps_results_of_other_requests(outputs: dict[str, tuple[Tensor, Tensor]]) -> None:
    (kept, count), (alone, _) = outputs["next to others"], naive.accept(*rows(30, 8))
    assert (kept[::3] == 7).all() and (count[::3] == 7).all() and torch.equal(kept[1::3], alone[1::3])
