"""Tokens from uniform numbers by the inverse of the distribution function; see README.md here."""

from __future__ import annotations

from torch import Tensor

from vllm_mtpc.kernels.pick import naive


def pick(logits: Tensor, u: Tensor) -> Tensor:
    """Return the tokens [T] int64 of logits [T, V] and u [T] float32; on a GPU by the Triton kernel."""
    if not logits.is_cuda:
        return naive.pick(logits, u)
    from vllm_mtpc.kernels.pick import kernel  # importing it imports triton

    return kernel.pick(logits, u)
