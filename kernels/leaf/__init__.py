"""Logits of leaves for drafting: all of them where tokens are drafted, two numbers each for x_1; see README.md here.

Weights [k, r, V, D] are unembeddings of k positions and r components, states [B, k or 1, r or 1, D] what they are
multiplied with, of a dimension of 1 the same for all. Weights of `fp8.quantise` come with a scale [k, r, V] per row.
"""

from __future__ import annotations

from torch import Tensor

from vllm_mtpc.kernels.leaf import naive
from vllm_mtpc.kernels.leaf.naive import evidence_of, terms_of

__all__ = ["evidence_of", "logits", "terms", "terms_of"]


def terms(states: Tensor, weight: Tensor, scale: Tensor | None, token: Tensor) -> Tensor:
    """Log-normaliser and the token's logit [B, 2, r] float32, -inf where the token is not in 0 .. V - 1.

    states [B, r or 1, D], weight [r, V, D], scale [r, V] or None, token [B] int64. Logits are not written down where
    the tensors are on a GPU.
    """
    if not states.is_cuda:
        return naive.terms(states, weight, scale, token)
    from vllm_mtpc.kernels.leaf import kernel  # importing it imports triton

    return kernel.terms(states, weight, scale, token)


def logits(states: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Logits [B, k, r, V] in the dtype of the states; a kernel of ours where weights are float8 on a GPU."""
    if scale is None or not states.is_cuda:
        return naive.logits(states, weight, scale)
    from vllm_mtpc.kernels.leaf import kernel

    return kernel.logits(states, weight, scale)
