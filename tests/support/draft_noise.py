"""Gumbel noise for tests of the draft kernel, made like vLLM's: by (seed, position, token), and in plain PyTorch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vllm_mtpc.kernels.uniform import naive
from vllm_mtpc.kernels.uniform.kernel import uniform_kernel


@triton.jit
def noised_argmax(logits, keys, mask, seed, pos, temp, IS_DRAFTING: tl.constexpr, USE_FP64: tl.constexpr):
    """The signature of vLLM's `gumbel_noised_argmax`; a stream is in the position."""
    tl.static_assert(not IS_DRAFTING)
    if USE_FP64:
        logits = logits.to(tl.float64)
    if temp != 0.0:
        u = uniform_kernel(seed * 100003 + keys.to(tl.int64), (keys * 0).to(tl.int64) + pos) + 2.9802322387695312e-08
        noise = -tl.log(-tl.log(u))
        logits = tl.where(mask, logits / temp + noise, float("-inf"))
    return tl.max(logits, axis=0, return_indices=True)


def noised(log_q: Tensor, seeds: Tensor, pos: Tensor, temperature: Tensor) -> Tensor:
    """Noised values [B, V] for seeds, positions and temperatures [B]."""
    batch, vocab_size = log_q.shape
    keys = seeds[:, None] * 100003 + torch.arange(vocab_size)
    u = naive.uniform(keys.flatten(), pos.repeat_interleave(vocab_size)).view(batch, vocab_size) + 2.0**-25
    is_greedy = (temperature == 0)[:, None]
    scaled = log_q / torch.where(is_greedy, 1.0, temperature[:, None])
    return torch.where(is_greedy, log_q, scaled - (-u.log()).log())
