"""Pick(u, Q): the smallest token j whose cumulative mass, in vocabulary order, exceeds u times the whole.

Q is softmax(logits). Where rounding leaves no such j, it is the last token with mass. Logits of -inf or NaN have no
mass; in a row without any mass the last index is picked.
"""

from __future__ import annotations

import torch
from torch import Tensor

BELOW_ONE = 1 - 2**-50  # times a sum in float64 it is below the sum


def pick(logits: Tensor, u: Tensor) -> Tensor:
    """Return the tokens [T] int64 of logits [T, V] float32 and u [T] float32 in [0, 1)."""
    x = torch.where(logits > -torch.inf, logits, -torch.inf).double()
    top = x.amax(dim=-1, keepdim=True)
    mass = torch.where(x > -torch.inf, (x - top).exp(), 0.0)  # [T, V]
    return torch.where((mass > 0).any(dim=-1), of_mass(mass, u), logits.shape[-1] - 1)


def of_mass(mass: Tensor, u: Tensor) -> Tensor:
    """Return the tokens [T] int64 of masses [T, V], not negative and not all 0, and u [T] in [0, 1)."""
    cumulative = mass.cumsum(dim=-1, dtype=torch.float64)
    level = u.double().clamp(max=BELOW_ONE)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, level, right=True)[:, 0].clamp(max=mass.shape[1] - 1)  # in a row of NaN
