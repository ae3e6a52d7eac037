"""The target's processed distribution, and the intervals of u in [0, 1) that pick its tokens.

A token at index k is Pick(u_k, Q_k): the first token in vocabulary order whose cumulative probability exceeds u_k. Its
interval is [left, right) = [F_(v-1), F_v), F the distribution function (arXiv 2512.21323, section 2.1). Serving draws u
from the multiples of 2^-24 below 1, so an interval that holds none of them belongs to a token that is never picked.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 1 << 24  # values of u


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
    last = right.ceil() - 1
    at = torch.minimum(torch.maximum(at, left.ceil()), last)
    return (at.clamp(0, STEPS - 1) / STEPS).float()
