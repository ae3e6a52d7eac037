"""The conditionals of a circuit along given tokens, all positions at once."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_mtpc.circuits.base import TINY, Circuit, CircuitParams, condition_on_before, evidence_with_skipped
from vllm_mtpc.kernels.filter import filter_weights


def conditionals(circuit: Circuit, params: CircuitParams, tokens: Tensor) -> Tensor:
    """Return log q(x_k = . | x_1 .. x_(k-1), h) along given tokens (MtPC paper, section 4: the terms of L_k).

    Args:
        circuit: the structure.
        params: of B circuits; the result is differentiable in them.
        tokens: [B, m] int64, m <= n; -1 marginalises a position for the later ones.

    Returns:
        [B, m - skip, V] float32, of the positions that have a leaf. Without a bigram no value is below the logarithm
        of the smallest normal float32 (-87.3).

    Raises:
        ValueError: a token follows a marginalised one and its leaf is conditioned on that.
    """
    evidence, leaf = evidence_with_skipped(params, tokens)  # [B, m, r]
    leaf, biases = leaf.exp(), None
    if params.bigram is not None and tokens.shape[1] > 1:
        biases = params.bigram.biases(tokens[:, :-1])  # [B, m - 1, V]
        evidence, norms = condition_on_before(evidence, leaf[:, 1 - params.skip :], biases, tokens, params)
    weights = filter_weights(circuit.program, evidence, params.root, params.inner)
    if biases is not None:
        weights = torch.cat([weights[:, :1], weights[:, 1:] - norms], dim=1)
    # A mixture as a product of matrices: several times faster than logsumexp over [B, m, r, V], and backward too.
    mixture = weights[:, params.skip :].exp()[:, :, None]  # [B, m - skip, 1, r]
    log_q = (mixture @ leaf)[:, :, 0].clamp(min=TINY).log()
    if biases is None:
        return log_q
    return log_q + biases if params.skip else torch.cat([log_q[:, :1], log_q[:, 1:] + biases], dim=1)
