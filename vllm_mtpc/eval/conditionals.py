"""The conditionals of a circuit along given tokens, all positions at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_mtpc.circuits.base import evidence_of

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.circuits import Circuit, CircuitParams


def conditionals(circuit: Circuit, params: CircuitParams, tokens: Tensor) -> Tensor:
    """log q(x_k = . | x_1..x_(k-1), h) along tokens[B, m], m <= n (MtPC paper, section 4: the terms of L_k).

    A token of -1 marginalises its position for the later ones. Returns [B, m, V] float32; values are at least
    log of the smallest normal float32 (-87.3). Differentiable in ``params``.
    """
    m = tokens.shape[1]
    leaf = params.leaf[:, :m]
    # One gather for all positions: one per position costs a full-size gradient of the leaves each.
    evidence = evidence_of(leaf, tokens)  # [B, m, r]
    state, weights = circuit.start(params), []
    for k in range(m):
        weights.append(state.weights)
        if k < m - 1:
            state = circuit.advance(params, state, k, evidence[:, k])
    # A mixture as a product of matrices: several times faster than logsumexp over [B, m, r, V], and backward too.
    mixture = torch.stack(weights, 1).exp()[:, :, None]  # [B, m, 1, r]
    tiny = torch.finfo(torch.float32).tiny
    return (mixture @ leaf.exp())[:, :, 0].clamp(min=tiny).log()
