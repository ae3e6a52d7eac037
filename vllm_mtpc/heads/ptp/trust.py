"""Drafts by u from a distribution that is only nearly the target's (an extension of arXiv 2512.21323).

The verifier's token is Pick(u, Q). A row gives P, near Q but not equal to it, and Pick(u, P) is wrong wherever an edge
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

from vllm_mtpc.heads.ptp.law import STEPS
from vllm_mtpc.kernels.pick import pick

EDGE = 1e-6  # in training no edge comes nearer to 0 or 1: Phi^-1 has no slope there that float32 could hold


def conditional(logits: Tensor, u: Tensor, trust: float) -> Tensor:
    """P(v | u) [..., V] float64 of logits[..., V] and u[...] in [0, 1), multiples of 2^-24; trust below 1.

    Tokens without mass (-inf, NaN) get none.
    """
    mass = torch.where(logits > -torch.inf, logits, -torch.inf).double().softmax(-1)
    below = _below(mass.cumsum(-1).clamp(max=1), _middle(u.double())[..., None], trust)
    below[..., -1] = 1
    return below.diff(dim=-1, prepend=torch.zeros_like(below[..., :1]))


def log_likelihood(logits: Tensor, u: Tensor, tokens: Tensor, trust: float, share: float) -> Tensor:
    """log(share P(x) + (1 - share) P(x | u)) [...] of tokens x[...], with gradients; share above 0."""
    probs, at = logits.float().softmax(-1), tokens[..., None]
    mass = probs.gather(-1, at)[..., 0]
    right = probs.cumsum(-1).gather(-1, at)[..., 0]
    edges = torch.stack([right - mass, right]).double()
    below = _below(edges.clamp(EDGE, 1 - EDGE), _middle(u.double()), trust)
    below = torch.where(edges < EDGE, 0.0, torch.where(edges > 1 - EDGE, 1.0, below))
    return (share * mass + (1 - share) * (below[1] - below[0]).float()).clamp(min=EDGE**2).log()


def reads_u(config: Any) -> bool:
    """Whether drafts of a head of this PtpConfig depend on u beyond the rows that carry it, temperature above 0."""
    return config.law_trust is not None or (config.informed and config.variant == "c-ptp")


def draft_tokens(config: Any, logits: Tensor, u: Tensor) -> Tensor:
    """Drafts [T] int64 of logits[T, V] and u[T] as a head of this config makes them at a temperature above 0.

    At temperature 0, where u tells nothing, drafts are the argmax for every head.
    """
    if not reads_u(config):  # the row knows its u (o-ptp), or nothing does and the likeliest token is the best guess
        return logits.argmax(-1)
    if config.law_trust is None:
        return pick(logits.float(), u.contiguous())
    return conditional(logits, u, config.law_trust).argmax(-1)


def _below(cumulative: Tensor, u: Tensor, trust: float) -> Tensor:
    """P(u' < F | u)."""
    shifted = torch.special.ndtri(cumulative) - trust * torch.special.ndtri(u)
    return torch.special.ndtr(shifted / (1 - trust * trust) ** 0.5)


def _middle(u: Tensor) -> Tensor:
    """The middle of the cell [u, u + 2^-24) that u stands for: never 0 or 1 (float64)."""
    return u + 0.5 / STEPS
