"""Losses of a PTP head, per row: between the student's law P of a row and the target's token or law Q.

Source: arXiv 2512.21323, section 2.2 and appendix C.2.

    ce          -log P(x)                                   o-ptp, inverse
                -log of x's probability given u             with law_trust (`vllm_mtpc.heads.ptp.trust`)
    bce         binary cross entropy of every token, sigmoid(logit) against 1{it is x}, summed
    kl          KL(Q || P)                                  c-ptp; o-ptp with law_trust, and its baseline
    reverse-kl  KL(P || Q), Q not below 1e-6
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_mtpc.heads.ptp.trust import log_likelihood

LAW_SHARE = 0.1  # of the law itself beside what u says, so that no token is impossible
FLOOR = math.log(1e-6)  # of log Q in the reverse KL: Q is zero outside top-k and top-p


def row_losses(
    name: str,
    logits: Tensor,
    tokens: Tensor,
    log_q: Tensor | None,
    u: Tensor | None = None,
    trust: float | None = None,
) -> Tensor:
    """[...] of logits[..., V], tokens[...] (any where none is known) and, for the KLs, log_q[..., V].

    With ``trust`` the cross entropy is that of what u[...], inside the tokens' intervals, says of them.
    """
    chosen = tokens.clamp(min=0)
    if name == "ce" and trust is not None:
        return -log_likelihood(logits, u, chosen, trust, LAW_SHARE)
    if name in ("ce", "inverse"):
        return F.cross_entropy(logits.flatten(0, -2), chosen.flatten(), reduction="none").view(chosen.shape)
    if name == "bce":
        return F.softplus(logits).sum(-1) - logits.gather(-1, chosen[..., None])[..., 0]
    log_p = logits.log_softmax(-1)
    if name == "kl":
        return (log_q.exp() * (log_q.clamp(min=torch.finfo(log_q.dtype).min) - log_p)).sum(-1)
    return (log_p.exp() * (log_p - log_q.clamp(min=FLOOR))).sum(-1)
