"""Embeddings of u: features against their definition number by number, dtypes, refusals."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from vllm_mtpc.heads.ptp.embedding import EMBEDDINGS, AuxEmbedding, default_options

torch.set_num_threads(1)
# 0, the largest u, powers of two (where bits and thresholds change) and their neighbours, and some in between.
POINTS = [0.0, 1 - 2**-24, 2**-24, 0.5, 0.5 - 2**-24, 0.5 + 2**-24, 0.25, 0.75, 1 / 3, 0.1, 0.7, 21 / 32, 0.999]
SIZE = 6


def bits(u: float) -> list[float]:
    word = struct.unpack(">I", struct.pack(">f", u))[0]
    return [float(word >> (31 - i) & 1) for i in range(32)]


DEFINITIONS = {
    "ieee": lambda u, n: bits(u),
    "scalar": lambda u, n: [u],
    "threshold": lambda u, n: [float(u <= i / n) for i in range(1, n + 1)],
    "arithmetic": lambda u, n: [float(math.fmod(u * 2 ** (i - 1), 1) <= 0.5) for i in range(1, n + 1)],
}


def points() -> torch.Tensor:
    return torch.tensor(POINTS, dtype=torch.float32)


def features(name: str, count: int | None) -> torch.Tensor:
    """What the linear layer of an embedding reads: its weight the unit matrix, its bias zero."""
    width = {"ieee": 32, "scalar": 1}.get(name, count)
    embedding = AuxEmbedding(name, width, count, None)
    torch.nn.init.eye_(embedding.outer.weight)
    torch.nn.init.zeros_(embedding.outer.bias)
    return embedding(points())


@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("count", [32, 8])
def test_features_are_those_of_the_definition(name: str, count: int) -> None:
    given = None if name in ("ieee", "scalar") else count
    expected = torch.tensor([DEFINITIONS[name](u, count) for u in points().double().tolist()])
    found = features(name, given).double()
    assert torch.equal(found, expected.double())


@pytest.mark.parametrize("name", ["scalar-mlp", "threshold-mlp", "arithmetic-mlp"])
def test_a_small_network_is_linear_gelu_linear(name: str) -> None:
    embedding = AuxEmbedding(name, SIZE, default_options(name, SIZE).get("u_features"), 3)
    plain = name.removesuffix("-mlp")
    values = torch.tensor([DEFINITIONS[plain](u, 32) for u in points().tolist()])
    hidden = torch.nn.functional.gelu(embedding.inner(values))
    assert hidden.shape[-1] == 3
    assert torch.allclose(embedding(points()), embedding.outer(hidden), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", EMBEDDINGS)
def test_u_is_not_rounded_to_the_dtype_of_the_weights(name: str, dtype: torch.dtype) -> None:
    """Half-precision weights: the embedding is the one that float32 computes from the same weights, rounded once.

    An embedding of u in half precision is an injected fault; it must be seen where the features are not bits of u.
    """
    torch.manual_seed(0)
    options = default_options(name, SIZE)
    sizes = name, SIZE, options.get("u_features"), options.get("u_hidden")
    half, exact = AuxEmbedding(*sizes).to(dtype), AuxEmbedding(*sizes)
    exact.load_state_dict({key: value.float() for key, value in half.state_dict().items()})
    u = torch.rand(512)
    with torch.autocast("cpu", torch.bfloat16):  # as in training with precision bf16
        found = half(u)
    assert found.dtype is dtype
    assert torch.equal(found, exact(u).to(dtype))
    assert not torch.equal(found, exact(u.to(dtype).float()).to(dtype))
