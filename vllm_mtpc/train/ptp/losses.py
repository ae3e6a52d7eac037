"""Losses of a PTP head's rows: between a row's distribution P and the target's token or distribution Q.

Source: arXiv 2512.21323, section 2.2 and appendix C.2. Each is (logits[..., V], tokens[...], log_q[..., V]) -> [...] in
nats; log_q is None where the loss needs no distribution of the target.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vllm_mtpc.heads.ptp.distribution import log_likelihood
from vllm_mtpc.train.options import TrainOptions

LAW_SHARE = 0.1  # of the distribution itself beside what u says, so that no token is impossible
FLOOR = math.log(1e-6)  # of log Q in the reverse KL: Q is zero outside top-k and top-p


def cross_entropy(logits: Tensor, tokens: Tensor, log_q: Tensor | None) -> Tensor:
    """-log P(x)."""
    return F.cross_entropy(logits.flatten(0, -2), tokens.flatten(), reduction="none").view(tokens.shape)


def binary_cross_entropy(logits: Tensor, tokens: Tensor, log_q: Tensor | None) -> Tensor:
    """Binary cross entropy of every token, sigmoid(logit) against 1{it is x}, summed."""
    return F.softplus(logits).sum(-1) - logits.gather(-1, tokens[..., None])[..., 0]


def kl(logits: Tensor, tokens: Tensor, log_q: Tensor) -> Tensor:
    """KL(Q || P)."""
    return (log_q.exp() * (log_q.clamp(min=torch.finfo(log_q.dtype).min) - logits.log_softmax(-1))).sum(-1)


def reverse_kl(logits: Tensor, tokens: Tensor, log_q: Tensor) -> Tensor:
    """KL(P || Q), Q not below 1e-6."""
    log_p = logits.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q.clamp(min=FLOOR))).sum(-1)


LOSSES = {
    "ce": cross_entropy,
    "bce": binary_cross_entropy,
    "kl": kl,
    "reverse-kl": reverse_kl,
    "inverse": cross_entropy,  # u lies inside the student's own intervals
}
NEED_LAW = {"kl", "reverse-kl"}
OF_VARIANT = {"o-ptp": ("ce", "bce", "kl"), "c-ptp": ("kl", "reverse-kl", "inverse")}  # the first is the default


def loss_name(options: TrainOptions) -> str:
    """The loss of a run, with its default."""
    return options.ptp_loss or OF_VARIANT[options.variant][0]


def row_losses(
    name: str,
    logits: Tensor,
    tokens: Tensor,
    log_q: Tensor | None,
    u: Tensor | None = None,
    trust: float | None = None,
) -> Tensor:
    """[...] of one of LOSSES; tokens below 0 where none is known.

    With ``trust`` the cross entropy is that of what u[...], inside the tokens' intervals, says of them
    (`vllm_mtpc.heads.ptp.distribution`).
    """
    tokens = tokens.clamp(min=0)
    if name == "ce" and trust is not None:
        return -log_likelihood(logits, u, tokens, trust, LAW_SHARE)
    return LOSSES[name](logits, tokens, log_q)
