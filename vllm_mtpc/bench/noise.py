"""Gumbel noise for timing the draft kernel where there is no vLLM: a hash of (seed, position, token), as vLLM's."""

from __future__ import annotations

import triton
import triton.language as tl

from vllm_mtpc.kernels.uniform.kernel import uniform_kernel


@triton.jit
def noised_argmax(logits, keys, mask, seed, pos, temp, IS_DRAFTING: tl.constexpr, USE_FP64: tl.constexpr):
    """The signature of vLLM's `gumbel_noised_argmax`."""
    if temp != 0.0:
        u = uniform_kernel(seed * 100003 + keys.to(tl.int64), (keys * 0).to(tl.int64) + pos) + 2.9802322387695312e-08
        logits = tl.where(mask, logits / temp - tl.log(-tl.log(u)), float("-inf"))
    return tl.max(logits, axis=0, return_indices=True)
