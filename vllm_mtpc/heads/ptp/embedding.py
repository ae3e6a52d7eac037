"""The embedding of the auxiliary variable u in [0, 1), which auxiliary rows carry in place of a token's embedding.

    e_i = 1{u <= i / n}, i = 1 .. n, then a linear layer

"Threshold" of the PTP paper (arXiv 2512.21323, appendix C.1); none of its others was better (benchmarks/PAPERS.md). u
is used in float32 for weights of any dtype: in half precision two values on either side of an edge are equal.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class AuxEmbedding(nn.Module):
    """Features of u in float32, then one linear layer.

    Args:
        size: D.
        features: n.
    """

    def __init__(self, size: int, features: int) -> None:
        super().__init__()
        self.outer = nn.Linear(features, size)

    def forward(self, u: Tensor) -> Tensor:
        """Return the embeddings, [..., D] in the dtype of the weights, of u [...]."""
        count, weight = self.outer.in_features, self.outer.weight
        with torch.autocast(u.device.type, enabled=False):
            ends = torch.arange(1, count + 1, device=u.device).float() / count
            features = (u.float()[..., None] <= ends).float()  # [..., n]
            return F.linear(features, weight.float(), self.outer.bias.float()).to(weight.dtype)
