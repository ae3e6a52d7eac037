"""Weights in float8_e4m3fn with a scale per row: half the bytes of bfloat16.

A scale is a power of two, so that a weight read back is exact in bfloat16 and float32: a GPU that multiplies as it
reads and a CPU that reads back once hold the same weights. It costs no precision, float8 being floating point.
"""

from __future__ import annotations

import torch
from torch import Tensor

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max  # 448


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., V, D] of any float dtype -> float8 [..., V, D] and scale [..., V] float32; product = weight."""
    top = weight.abs().amax(dim=-1).float()
    scale = torch.exp2(torch.ceil(torch.log2(top.clamp(min=torch.finfo(torch.float32).tiny) / LARGEST)))
    scale = scale.clamp(min=2.0**-126)
    rounded = (weight.float() / scale.unsqueeze(-1)).clamp(-LARGEST, LARGEST).to(FORMAT)
    return rounded, scale


def dequantise(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights that `quantise` has left, in `dtype`."""
    return (weight.float() * scale.unsqueeze(-1)).to(dtype)


def is_fast_on(device: torch.device) -> bool:
    """Whether kernels can read float8_e4m3fn there: an NVIDIA GPU of compute capability 8.9 and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
