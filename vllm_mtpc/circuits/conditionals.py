"""The conditionals of a circuit along given tokens, all positions at once."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_mtpc.circuits.base import Circuit, CircuitParams, evidence_of
from vllm_mtpc.kernels.filter import filter_weights


def conditionals(circuit: Circuit, params: CircuitParams, tokens: Tensor) -> Tensor:
    """log q(x_k = . | x_1..x_(k-1), h) along tokens[B, m], m <= n (MtPC paper, section 4: the terms of L_k).

    A token of -1 marginalises its position for the later ones. Returns [B, m, V] float32; values are at least
    log of the smallest normal float32 (-87.3). Differentiable in ``params``.
    """
    leaf = params.leaf[:, : tokens.shape[1]]
    # One gather for all positions: one per position costs a full-size gradient of the leaves each.
    evidence = evidence_of(leaf, tokens)  # [B, m, r]
    weights = filter_weights(circuit.program, evidence, params.root, params.inner)
    # A mixture as a product of matrices: several times faster than logsumexp over [B, m, r, V], and backward too.
    mixture = weights.exp()[:, :, None]  # [B, m, 1, r]
    tiny = torch.finfo(torch.float32).tiny
    return (mixture @ leaf.exp())[:, :, 0].clamp(min=tiny).log()
