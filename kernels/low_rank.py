"""Components of a leaf as low-rank differences from logits that they have in common.

leaf_k[z, v] = base_k[v] + (low_k[z] out_k)[v]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class LowRank(NamedTuple):
    """The differences of the components at k positions."""

    low: Tensor  # [B, k, r, C]; the last two dimensions are contiguous
    out: Tensor  # [k, C, V]

    def leaves(self, base: Tensor) -> Tensor:
        """Return the logits [B, k, r, V] for base [B, k, 1, V], in its dtype."""
        batch, positions, r, _ = self.low.shape
        low = self.low.transpose(0, 1).flatten(1, 2)  # one product per position
        terms = torch.bmm(low, self.out).view(positions, batch, r, -1).transpose(0, 1)
        return terms.to(base.dtype).add_(base)  # in place: both are large

    def positions(self, first: int, stop: int | None = None) -> LowRank:
        """Return those of the positions first .. stop - 1."""
        return LowRank(self.low[:, first:stop], self.out[first:stop])
