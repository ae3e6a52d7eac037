"""Gumbel noise for timing the draft kernel: vLLM's own, which serving uses; without vLLM one that costs the same."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from vllm_mtpc.kernels.uniform.kernel import uniform_kernel


@triton.jit
def noised_argmax(logits, keys, mask, seed, pos, temp, IS_DRAFTING: tl.constexpr, USE_FP64: tl.constexpr):
    """The signature of vLLM's `gumbel_noised_argmax`: a hash of (seed, position, token), as there."""
    if temp != 0.0:
        u = uniform_kernel(seed * 100003 + keys.to(tl.int64), (keys * 0).to(tl.int64) + pos) + 2.9802322387695312e-08
        logits = tl.where(mask, logits / temp - tl.log(-tl.log(u)), float("-inf"))
    return tl.max(logits, axis=0, return_indices=True)


def noise() -> Any:
    try:
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax
    except ImportError:
        return noised_argmax
    return gumbel_noised_argmax
