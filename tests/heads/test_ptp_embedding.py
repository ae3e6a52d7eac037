"""The embedding of u: its features number by number, and its dtypes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm_mtpc.heads.ptp.layers import PtpLayers

torch.set_num_threads(1)
# 0, the largest u, powers of two (where thresholds change) and their neighbours, and some in between.
POINTS = [0.0, 1 - 2**-24, 2**-24, 0.5, 0.5 - 2**-24, 0.5 + 2**-24, 0.25, 0.75, 1 / 3, 0.1, 0.7, 21 / 32, 0.999]


def layers_of(features: int, size: int) -> PtpLayers:
    return PtpLayers(SimpleNamespace(u_features=features, hidden_size=size, late_width=None))


@pytest.mark.parametrize("count", [32, 8])
def test_features_are_those_of_the_definition(count: int) -> None:
    embedding = layers_of(count, count)
    torch.nn.init.eye_(embedding.outer.weight)
    torch.nn.init.zeros_(embedding.outer.bias)
    points = torch.tensor(POINTS, dtype=torch.float32)
    expected = torch.tensor([[float(u <= i / count) for i in range(1, count + 1)] for u in points.double().tolist()])
    assert torch.equal(embedding(points), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_u_is_not_rounded_to_the_dtype_of_the_weights(dtype: torch.dtype) -> None:
    """Half-precision weights: the embedding is the one that float32 computes from the same weights, rounded once.

    An embedding of u in half precision is an injected fault that must be seen.
    """
    torch.manual_seed(0)
    half, exact = layers_of(32, 6).to(dtype), layers_of(32, 6)
    exact.load_state_dict({key: value.float() for key, value in half.state_dict().items()})
    u = torch.rand(512)
    with torch.autocast("cpu", torch.bfloat16):  # as in training with precision bf16
        found = half(u)
    assert found.dtype is dtype
    assert torch.equal(found, exact(u).to(dtype))
    assert not torch.equal(found, exact(u.to(dtype).float()).to(dtype))
