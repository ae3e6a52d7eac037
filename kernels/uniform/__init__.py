"""Uniform numbers as a function of (seed, position); see README.md here."""

from __future__ import annotations

from torch import Tensor

from vllm_mtpc.kernels.uniform import naive


def uniform(seed: Tensor, pos: Tensor) -> Tensor:
    """Return u [T] float32 of seed [T] int64 and pos [T] integers; on a GPU by the Triton kernel."""
    if not seed.is_cuda:
        return naive.uniform(seed, pos)
    from vllm_mtpc.kernels.uniform import kernel  # importing it imports triton

    return kernel.uniform(seed, pos)
