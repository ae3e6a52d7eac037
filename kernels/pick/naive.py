"""Pick(u, Q): the smallest token j whose cumulative mass, in vocabulary order, exceeds u times the whole.

Q is softmax(logits). Where rounding leaves no such j, it is the last token with mass. Logits of -inf or NaN have no
mass; in a row without any mass the last index is picked.

Trust r: a row gives P, near Q but not equal to it. Let the target's token be Pick(u', P), with Phi^-1(u) and
Phi^-1(u') standard normals of correlation r. With F the distribution function of P,

    P(v | u) = Phi((a_v - r b) / sqrt(1 - r^2)) - Phi((a_(v-1) - r b) / sqrt(1 - r^2)),   a = Phi^-1(F), b = Phi^-1(u)

The mean of P(v | u) over u is P(v); r = 1 is Pick, r = 0 is P itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_mtpc.kernels.uniform.naive import BITS, uniform

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


def conditional(logits: Tensor, u: Tensor, trust: float) -> Tensor:
    """Return P(v | u) as above, [..., V] float64, of logits [..., V], u [...] and r = trust < 1.

    u: in [0, 1), multiples of 2^-24. Tokens without mass (-inf, NaN) have none.
    """
    mass = torch.where(logits > -torch.inf, logits, -torch.inf).double().softmax(-1)
    below = mass_below(mass.cumsum(-1).clamp(max=1), u[..., None], trust)
    below[..., -1] = 1
    return below.diff(dim=-1, prepend=torch.zeros_like(below[..., :1]))


def mass_below(cumulative: Tensor, u: Tensor, trust: float) -> Tensor:
    """P(u' < F | u) of float64 F; u is taken as the middle of its cell [u, u + 2^-24), so it is never 0 or 1."""
    shifted = torch.special.ndtri(cumulative) - trust * torch.special.ndtri(u.double() + 0.5**BITS / 2)
    return torch.special.ndtr(shifted / (1 - trust * trust) ** 0.5)


def select_tokens(
    logits: Tensor, slots: Tensor, pos: Tensor, seeds: Tensor, temperature: Tensor, trust: float | None = None
) -> Tensor:
    """Return the token [T] int64 of each row that its request's u selects: the argmax at temperature 0.

    logits: [T, V], which include the temperature; seeds, temperature: [slots], int64 and float32.
    slots, pos: [T], request slot of each row, and the position that the u of its token is hashed from.
    trust: None: Pick(u, softmax(logits)); else the token with the largest P(v | u).
    """
    u = uniform(seeds[slots], pos)
    picked = pick(logits.float(), u) if trust is None else conditional(logits, u, trust).argmax(-1)
    return torch.where(temperature[slots] == 0, logits.argmax(-1), picked)
