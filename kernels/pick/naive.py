"""Pick(u, Q): the smallest token j whose cumulative mass, in vocabulary order, exceeds u times the whole.

With u uniform on [0, 1) the token follows Q = softmax(logits). Where rounding leaves no such j, it is the last token
with mass. Logits of -inf or NaN have no mass and are never picked; in a row without any mass it is the last index.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pick(logits: Tensor, u: Tensor) -> Tensor:
    """Tokens [T] int64 of logits [T, V] float32 and u [T] float32 in [0, 1)."""
    vocab_size = logits.shape[-1]
    x = torch.where(logits > -torch.inf, logits, -torch.inf).double()
    top = x.amax(dim=-1, keepdim=True)
    mass = torch.where(x > -torch.inf, (x - top).exp(), 0.0)  # [T, V]
    cumulative = mass.cumsum(dim=-1)
    index = torch.arange(vocab_size, device=logits.device)
    over = (mass > 0) & (cumulative > u.double()[:, None] * cumulative[:, -1:])
    first = torch.where(over, index, vocab_size).amin(dim=-1)
    last = torch.where(mass > 0, index, -1).amax(dim=-1)
    token = torch.minimum(first, last)
    return torch.where(token < 0, vocab_size - 1, token)
