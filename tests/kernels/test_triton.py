"""The Triton kernels against their definitions in PyTorch: interpreted on a CPU, natively on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support import interpreted
from tests.support.kernel_cases import INF, PICKED
from vllm_mtpc.kernels.pick import naive as pick_naive
from vllm_mtpc.kernels.uniform import naive as uniform_naive

torch.set_num_threads(1)

EDGE, AT_EDGE = 1e-6, 1e-3  # tokens may differ where u is as close as this to an edge, in less than this share of draws


@pytest.fixture(scope="module")
def outputs() -> dict[str, Tensor]:
    return interpreted.run(PICKED)


def at_an_edge(logits: Tensor, u: Tensor) -> Tensor:
    """Whether u lies within EDGE of an edge of the distribution function in float64."""
    logits = torch.where(logits.isnan(), -INF, logits).double()
    mass = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    distribution = mass.cumsum(dim=-1) / mass.sum(dim=-1, keepdim=True)
    return (distribution - u.double()[:, None]).abs().amin(dim=-1) < EDGE


@pytest.mark.parametrize("name", [name for name, case in PICKED.items() if case[0] == "uniform"])
def test_uniform_bit_for_bit(name: str, outputs: dict[str, Tensor]) -> None:
    wanted = uniform_naive.uniform(*PICKED[name][1])
    assert outputs[name].dtype == torch.float32
    assert torch.equal(outputs[name].view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("name", [name for name, case in PICKED.items() if case[0] == "pick" and name != "edges"])
def test_pick_equals_its_definition(name: str, outputs: dict[str, Tensor]) -> None:
    logits, u = PICKED[name][1]
    got, wanted = outputs[name], pick_naive.pick(logits, u)
    assert got.dtype == torch.int64 and got.shape == wanted.shape
    differs = got != wanted
    assert not (differs & ~at_an_edge(logits, u)).any()
    assert name == "empty rows" or (logits.gather(1, got[:, None]) > -INF).all(), "a token without mass"


def test_pick_seldom_differs_at_all(outputs: dict[str, Tensor]) -> None:
    picks = {name: arguments for name, (operation, arguments) in PICKED.items() if operation == "pick"}
    differ = sum(int((outputs[name] != pick_naive.pick(*arguments)).sum()) for name, arguments in picks.items())
    draws = sum(len(u) for _, u in picks.values())
    print(f"{differ} of {draws} tokens differ from those of the definition")
    assert differ <= AT_EDGE * draws


def test_pick_at_exact_edges(outputs: dict[str, Tensor]) -> None:
    """Token k/64 of the vocabulary begins at u = k/64 exactly."""
    assert outputs["edges"].tolist() == list(range(0, 8192, 128))


def test_pick_does_not_depend_on_the_batch(outputs: dict[str, Tensor]) -> None:
    assert outputs["alone"][0] == outputs["150x13000"][7]
