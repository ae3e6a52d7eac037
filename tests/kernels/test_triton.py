"""The Triton kernels against their definitions in PyTorch: interpreted on a CPU, natively on a GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from tests.support import interpreted
from vllm_mtpc.kernels.pick import naive as pick_naive
from vllm_mtpc.kernels.uniform import naive as uniform_naive

torch.set_num_threads(1)
NO_TRITON = "triton is not installed: only the PyTorch definitions can be tested here (pip install triton)"
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason=NO_TRITON)

INF, NAN = float("inf"), float("nan")
LARGEST = 1 - 2**-24
EDGE, AT_EDGE = 1e-6, 1e-3  # tokens may differ where u is as close as this to an edge, in less than this share of draws
SIZES = [(1000, 200), (1, 1), (20, 1), (50, 17), (50, 4096), (50, 4097), (150, 13_000), (5, 150_000)]


def draws(rows: int, vocab: int, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + vocab)
    logits = torch.randn(rows, vocab, generator=generator) * scale
    u = torch.randint(2**24, (rows,), generator=generator) * 2.0**-24
    u[0] = LARGEST
    return logits, u


def holes(vocab: int = 9000) -> tuple[Tensor, Tensor]:
    """Rows with runs of -inf: at the start, at the end, between, whole blocks, everything but one token; and NaN."""
    logits, _ = draws(30, vocab)
    runs = [(0, 5000), (4096, 8192), (4000, vocab), (100, 8500), (1, vocab), (0, vocab - 1)]
    for row, (start, end) in enumerate(runs):
        logits[5 * row : 5 * row + 5, start:end] = -INF
    logits[20:25, 0] = -30.0  # the only token of its row
    logits[:25:7, vocab - 1] = NAN
    u = torch.tensor([0.0, 0.25, 0.5, 0.999, LARGEST]).repeat(6)
    return logits, u


def strided() -> tuple[Tensor, Tensor]:
    """Rows with other numbers behind and between them, large enough to be picked."""
    logits, u = draws(50, 300)
    padded = torch.full((50, 311), 1e4)
    padded[:, :300] = logits
    return padded[:, :300], u


def edges() -> tuple[Tensor, Tensor]:
    """Equal masses, u at every edge: exact in both, so no side may be chosen freely."""
    return torch.zeros(64, 8192), torch.arange(64) / 64


def uniforms() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    extremes = torch.tensor([-(2**63), -(2**32), -1, 0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
    seed = torch.cat([extremes, torch.randint(-(2**63), 2**63 - 1, (5000,), generator=generator)])
    pos = torch.cat([extremes.flip(0), torch.arange(5000)])
    return seed, pos


CASES: dict[str, interpreted.Case] = {
    **{f"{rows}x{vocab}": ("pick", draws(rows, vocab)) for rows, vocab in SIZES},
    "peaked": ("pick", draws(200, 5000, scale=20.0)),
    "holes": ("pick", holes()),
    "strided": ("pick", strided()),
    "edges": ("pick", edges()),
    "empty rows": ("pick", (torch.tensor([[-INF] * 5000, [NAN] * 5000]), torch.tensor([0.0, LARGEST]))),
    "bfloat16": ("pick", (draws(100, 500)[0].bfloat16(), draws(100, 500)[1])),
    "no rows": ("pick", (torch.zeros(0, 7), torch.zeros(0))),
    "alone": ("pick", tuple(part[7:8] for part in draws(150, 13_000))),
    "uniform": ("uniform", uniforms()),
    "int32 positions": ("uniform", (torch.arange(2000), torch.arange(2000, dtype=torch.int32))),
    "none": ("uniform", (torch.zeros(0, dtype=torch.int64),) * 2),
}


@pytest.fixture(scope="module")
def outputs() -> dict[str, Tensor]:
    return interpreted.run(CASES)


def at_an_edge(logits: Tensor, u: Tensor) -> Tensor:
    """Whether u lies within EDGE of an edge of the distribution function in float64."""
    logits = torch.where(logits.isnan(), -INF, logits).double()
    mass = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    distribution = mass.cumsum(dim=-1) / mass.sum(dim=-1, keepdim=True)
    return (distribution - u.double()[:, None]).abs().amin(dim=-1) < EDGE


def test_buffers_are_poisoned(outputs: dict[str, Tensor]) -> None:
    assert outputs["poison"].isnan().all()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == "uniform"])
def test_uniform_bit_for_bit(name: str, outputs: dict[str, Tensor]) -> None:
    wanted = uniform_naive.uniform(*CASES[name][1])
    assert outputs[name].dtype == torch.float32
    assert torch.equal(outputs[name].view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[0] == "pick" and name != "edges"])
def test_pick_equals_its_definition(name: str, outputs: dict[str, Tensor]) -> None:
    logits, u = CASES[name][1]
    got, wanted = outputs[name], pick_naive.pick(logits, u)
    assert got.dtype == torch.int64 and got.shape == wanted.shape
    differs = got != wanted
    assert not (differs & ~at_an_edge(logits, u)).any()
    assert name == "empty rows" or (logits.gather(1, got[:, None]) > -INF).all(), "a token without mass"


def test_pick_seldom_differs_at_all(outputs: dict[str, Tensor]) -> None:
    picks = {name: arguments for name, (operation, arguments) in CASES.items() if operation == "pick"}
    differ = sum(int((outputs[name] != pick_naive.pick(*arguments)).sum()) for name, arguments in picks.items())
    draws = sum(len(u) for _, u in picks.values())
    print(f"{differ} of {draws} tokens differ from those of the definition")
    assert differ <= AT_EDGE * draws


def test_pick_at_exact_edges(outputs: dict[str, Tensor]) -> None:
    """Token k/64 of the vocabulary begins at u = k/64 exactly."""
    assert outputs["edges"].tolist() == list(range(0, 8192, 128))


def test_pick_does_not_depend_on_the_batch(outputs: dict[str, Tensor]) -> None:
    assert outputs["alone"][0] == outputs["150x13000"][7]
