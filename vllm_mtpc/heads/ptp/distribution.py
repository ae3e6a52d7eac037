"""Distributions and u: the target's, the intervals of u in [0, 1) that pick its tokens, and drafts by u.

A token at index k is Pick(u_k, Q_k), Q the target's processed distribution: the first token in vocabulary order whose
cumulative probability exceeds u_k. Its interval is [left, right) = [F_(v-1), F_v), F the distribution function (arXiv
2512.21323, section 2.1). Serving draws u from the multiples of 2^-24 below 1.

Trust (an extension of the paper, `kernels/pick/naive.py`): a row gives P, near Q but not equal to it, and the draft is
the most probable token given u.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.kernels.pick import pick
from vllm_mtpc.kernels.pick.naive import conditional, mass_below

STEPS = 1 << 24  # values of u
EDGE = 1e-6  # minimum distance of an edge to 0 and 1 in training: the slope of Phi^-1 there exceeds float32


def processed(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Return log Q [..., V] float32 of logits [..., V], as vLLM computes it.

    A temperature above 0, then top-k (0: off; ties with the k-th stay), then top-p of the rest (1: off).
    """
    logits = logits.float()
    if temperature != 1:
        logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        weakest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < weakest, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1)
        dropped = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        dropped[..., -1] = False
        logits = logits.masked_fill(torch.empty_like(dropped).scatter(-1, order, dropped), -torch.inf)
    return logits.log_softmax(-1)


def edges(log_probs: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """Return left and right [...] float64 of the interval of u that picks token [...] from log Q [..., V].

    They are equal where the token has no mass (arXiv 2512.21323, section 2.1).
    """
    cumulative = log_probs.double().exp().cumsum(-1)
    total, at = cumulative[..., -1], token.long()[..., None]
    right = cumulative.gather(-1, at)[..., 0] / total
    left = cumulative.gather(-1, (at - 1).clamp(min=0))[..., 0] / total
    return left.masked_fill(token == 0, 0.0), right


def u_inside(left: Tensor, right: Tensor, inner: Tensor) -> Tensor:
    """Return u [...] float32 at a fraction `inner` [...] of [left, right): a multiple of 2^-24 inside, if any."""
    left, right = left.double() * STEPS, right.double() * STEPS  # exact
    at = (left + inner.double() * (right - left)).floor()
    at = torch.minimum(torch.maximum(at, left.ceil()), right.ceil() - 1)
    return (at.clamp(0, STEPS - 1) / STEPS).float()


def log_likelihood(logits: Tensor, u: Tensor, tokens: Tensor, trust: float, share: float) -> Tensor:
    """Return log(share P(x) + (1 - share) P(x | u)) [...] float32 of logits [..., V] of P, with gradients.

    u: [...] in [0, 1), multiples of 2^-24; tokens: [...] integers, x; trust: r, below 1; share: above 0.
    """
    probs, at = logits.float().softmax(-1), tokens[..., None]
    mass = probs.gather(-1, at)[..., 0]
    right = probs.cumsum(-1).gather(-1, at)[..., 0]
    ends = torch.stack([right - mass, right]).double()
    below = mass_below(ends.clamp(EDGE, 1 - EDGE), u, trust)
    below = torch.where(ends < EDGE, 0.0, torch.where(ends > 1 - EDGE, 1.0, below))
    return (share * mass + (1 - share) * (below[1] - below[0]).float()).clamp(min=EDGE**2).log()


def draft_tokens(config: Any, logits: Tensor, u: Tensor) -> Tensor:
    """Return the drafts [T] of a PtpConfig from logits [T, V] and u [T], at a temperature above 0 (at 0: argmax)."""
    if not config.picks:  # the row has read its u (o-ptp), or the argmax is the best guess (independent)
        return logits.argmax(-1)
    if config.distribution_trust is None:
        return pick(logits.float(), u.contiguous())
    return conditional(logits, u, config.distribution_trust).argmax(-1)
