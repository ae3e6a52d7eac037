"""Distributions and u: the target's, the intervals of u in [0, 1) that pick its tokens, and drafts by u.

A token at index k is Pick(u_k, Q_k), Q the target's processed distribution: the first token in vocabulary order whose
cumulative probability exceeds u_k. Its interval is [left, right) = [F_(v-1), F_v), F the distribution function (arXiv
2512.21323, section 2.1). Serving draws u from the multiples of 2^-24 below 1, so an interval that holds none of them
belongs to a token that is never picked.

Trust (an extension of the paper): a row gives P, near Q but not equal to it, and Pick(u, P) is wrong wherever an edge
between P's intervals lies on the other side of u: it takes P at its word. Trust r says how far to. Let the verifier's
token be Pick(u', P), with Phi^-1(u) and Phi^-1(u') standard normals of correlation r. With F the distribution function
of P in vocabulary order,

    P(v | u) = Phi((a_v - r b) / sqrt(1 - r^2)) - Phi((a_(v-1) - r b) / sqrt(1 - r^2)),   a = Phi^-1(F), b = Phi^-1(u)

u' is uniform whatever r, so the mean of P(v | u) over u is P(v). r = 1 is Pick; r = 0 P itself, whose likeliest token
is the best guess without u. The draft is the likeliest token given u.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.kernels.pick import pick

STEPS = 1 << 24  # values of u
EDGE = 1e-6  # in training no edge comes nearer to 0 or 1: Phi^-1 has no slope there that float32 could hold


def processed(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """log Q [..., V] float32 of logits[..., V]: temperature (> 0), then top-k (0: off), then top-p (1: off).

    vLLM's rule: tokens that tie with the k-th stay; top-p renormalises what top-k left and keeps the smallest set of
    the likeliest tokens with mass p or more.
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
    """(left, right) [...] float64 of token[...] under log_probs[..., V]; equal where the token has no mass."""
    cumulative = log_probs.double().exp().cumsum(-1)
    total, at = cumulative[..., -1], token.long()[..., None]
    right = cumulative.gather(-1, at)[..., 0] / total
    left = cumulative.gather(-1, (at - 1).clamp(min=0))[..., 0] / total
    return left.masked_fill(token == 0, 0.0), right


def u_inside(left: Tensor, right: Tensor, inner: Tensor) -> Tensor:
    """u [...] float32 at the fraction inner[...] in [0, 1) of [left, right), rounded down to a multiple of 2^-24.

    It stays inside wherever the interval holds such a multiple.
    """
    left, right = left.double() * STEPS, right.double() * STEPS  # exact
    at = (left + inner.double() * (right - left)).floor()
    at = torch.minimum(torch.maximum(at, left.ceil()), right.ceil() - 1)
    return (at.clamp(0, STEPS - 1) / STEPS).float()


def conditional(logits: Tensor, u: Tensor, trust: float) -> Tensor:
    """P(v | u) [..., V] float64 of logits[..., V] and u[...] in [0, 1), multiples of 2^-24; trust below 1.

    Tokens without mass (-inf, NaN) get none.
    """
    mass = torch.where(logits > -torch.inf, logits, -torch.inf).double().softmax(-1)
    below = _below(mass.cumsum(-1).clamp(max=1), u[..., None], trust)
    below[..., -1] = 1
    return below.diff(dim=-1, prepend=torch.zeros_like(below[..., :1]))


def log_likelihood(logits: Tensor, u: Tensor, tokens: Tensor, trust: float, share: float) -> Tensor:
    """log(share P(x) + (1 - share) P(x | u)) [...] of tokens x[...], with gradients; share above 0."""
    probs, at = logits.float().softmax(-1), tokens[..., None]
    mass = probs.gather(-1, at)[..., 0]
    right = probs.cumsum(-1).gather(-1, at)[..., 0]
    ends = torch.stack([right - mass, right]).double()
    below = _below(ends.clamp(EDGE, 1 - EDGE), u, trust)
    below = torch.where(ends < EDGE, 0.0, torch.where(ends > 1 - EDGE, 1.0, below))
    return (share * mass + (1 - share) * (below[1] - below[0]).float()).clamp(min=EDGE**2).log()


def reads_u(config: Any) -> bool:
    """Whether drafts of a head of this PtpConfig depend on u beyond the rows that carry it, temperature above 0."""
    return config.variant in ("c-ptp", "late")


def draft_tokens(config: Any, logits: Tensor, u: Tensor) -> Tensor:
    """Drafts [T] int64 of logits[T, V] and u[T] as a head of this config makes them at a temperature above 0.

    At temperature 0, where u tells nothing, drafts are the argmax for every head.
    """
    if not reads_u(config):  # the row knows its u (o-ptp), or nothing does and the likeliest token is the best guess
        return logits.argmax(-1)
    if config.variant == "c-ptp":
        return pick(logits.float(), u.contiguous())
    return conditional(logits, u, config.distribution_trust).argmax(-1)


def _below(cumulative: Tensor, u: Tensor, trust: float) -> Tensor:
    """P(u' < F | u) of float64 F; u[...] is the middle of the cell [u, u + 2^-24) it stands for: never 0 or 1."""
    shifted = torch.special.ndtri(cumulative) - trust * torch.special.ndtri(u.double() + 0.5 / STEPS)
    return torch.special.ndtr(shifted / (1 - trust * trust) ** 0.5)
