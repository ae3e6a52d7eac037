"""Tokens from uniform numbers by the inverse of the distribution function; see README.md here."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllm_mtpc.kernels.pick import naive


def pick(logits: Tensor, u: Tensor) -> Tensor:
    """Return the tokens [T] int64 of logits [T, V] and u [T] float32; on a GPU by the Triton kernel."""
    return _implementation(logits).pick(logits, u)


def select_tokens(
    logits: Tensor, slots: Tensor, pos: Tensor, seeds: Tensor, temperature: Tensor, trust: float | None = None
) -> Tensor:
    """Return `naive.select_tokens`; on a GPU by Triton kernels."""
    return _implementation(logits).select_tokens(logits, slots, pos, seeds, temperature, trust)


def _implementation(logits: Tensor) -> Any:
    if not logits.is_cuda:
        return naive
    from vllm_mtpc.kernels.pick import kernel  # importing it imports triton

    return kernel
