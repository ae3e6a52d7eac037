"""Gumbel noise for timing the draft kernel: vLLM's own, which serving uses; without vLLM one that costs the same."""

from __future__ import annotations

try:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax
except ImportError:
    import triton
    import triton.language as tl

    from vllm_mtpc.kernels.uniform.kernel import uniform_kernel

    @triton.jit
    def gumbel_noised_argmax(logits, keys, mask, seed, pos, temp, IS_DRAFTING: tl.constexpr, USE_FP64: tl.constexpr):
        if temp != 0.0:  # a hash of (seed, position, token), as vLLM's
            uniform = uniform_kernel(seed * 100003 + keys.to(tl.int64), (keys * 0).to(tl.int64) + pos)
            noise = -tl.log(-tl.log(uniform + 2.9802322387695312e-08))
            logits = tl.where(mask, logits / temp + noise, float("-inf"))
        return tl.max(logits, axis=0, return_indices=True)
