"""Logits of leaves for drafting: all at drafted positions, two numbers per component at x_1; see README.md here.

Weights [k, r, V, D] are unembeddings of k positions and r components, states [B, D] the input of all.
"""

from __future__ import annotations

from torch import Tensor

from vllm_mtpc.kernels.leaf import naive
from vllm_mtpc.kernels.leaf.naive import evidence_of, logits, terms_of

__all__ = ["evidence_of", "logits", "terms", "terms_of"]


def terms(states: Tensor, weight: Tensor, token: Tensor) -> Tensor:
    """Return log-normaliser and logit [B, 2, r] float32 of token [B] int64, on a GPU without storing the logits.

    states: [B, D]; weight: [r, V, D]; outside 0 .. V - 1 the token's logit is -inf.
    """
    if not states.is_cuda:
        return naive.terms(states, weight, token)
    from vllm_mtpc.kernels.leaf import kernel  # importing it imports triton

    return kernel.terms(states, weight, token)
