"""Logits of leaves for drafting: all of them where tokens are drafted, two numbers each for x_1; see README.md here.

Weights [k, r, V, D] are unembeddings of k positions and r components, states [B, k or 1, r or 1, D] what they are
multiplied with, of a dimension of 1 the same for all.
"""

from __future__ import annotations

from torch import Tensor

from vllm_mtpc.kernels.leaf import naive
from vllm_mtpc.kernels.leaf.naive import evidence_of, logits, terms_of

__all__ = ["evidence_of", "logits", "terms", "terms_of"]


def terms(states: Tensor, weight: Tensor, token: Tensor) -> Tensor:
    """Log-normaliser and the token's logit [B, 2, r] float32, -inf where the token is not in 0 .. V - 1.

    states [B, r or 1, D], weight [r, V, D], token [B] int64. Logits are not written down where the tensors are on
    a GPU.
    """
    if not states.is_cuda:
        return naive.terms(states, weight, token)
    from vllm_mtpc.kernels.leaf import kernel  # importing it imports triton

    return kernel.terms(states, weight, token)
