"""Pick(u, Q): the smallest token j whose cumulative mass, in vocabulary order, exceeds u times the whole.

Q is softmax(logits). Where rounding leaves no such j, it is the last token with mass. Logits of -inf or NaN have no
mass; in a row without any mass the last index is picked.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pick(logits: Tensor, u: Tensor) -> Tensor:
    """Return the tokens [T] int64 of logits [T, V] float32 and u [T] float32 in [0, 1)."""
    x = torch.where(logits > -torch.inf, logits, -torch.inf).double()
    top = x.amax(dim=-1, keepdim=True)
    mass = torch.where(x > -torch.inf, (x - top).exp(), 0.0)  # [T, V]
    return torch.where((mass > 0).any(dim=-1), of_mass(mass, u), logits.shape[-1] - 1)


def of_mass(mass: Tensor, u: Tensor) -> Tensor:
    """Return the tokens [T] int64 of masses [T, V], not negative and not all 0, and u [T] in [0, 1)."""
    cumulative = mass.cumsum(dim=-1, dtype=torch.float64)
    whole = cumulative[:, -1:].contiguous()
    token = torch.searchsorted(cumulative, u.double()[:, None] * whole, right=True)
    last = torch.searchsorted(cumulative, whole)  # rounding may leave none above
    return torch.minimum(token, last)[:, 0].clamp(max=mass.shape[1] - 1)
