"""Tokens from uniform numbers by the inverse of the distribution function; see README.md here."""

from __future__ import annotations

from torch import Tensor

from vllm_mtpc.kernels.pick import naive


def pick(logits: Tensor, u: Tensor) -> Tensor:
    """Tokens [T] int64 of logits [T, V] and u [T]; the Triton kernel where the tensors are on a GPU."""
    if not logits.is_cuda:
        return naive.pick(logits, u)
    from vllm_mtpc.kernels.pick import kernel  # importing it imports triton

    return kernel.pick(logits, u)
