"""Linear head: one unembedding per position and component, sum weights linear in the hidden state.

leaf[k, z, :] = log_softmax(U[k, z] h)      root = log_softmax(R h)
inner[f, z, :] = log_softmax(W[f, z] h + b[f, z])                      (MtPC paper, section 4)
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mtpc.heads.base import INIT_STD, STAY_PROBABILITY, Head

__all__ = ["INIT_STD", "STAY_PROBABILITY", "LinearHead"]


class LinearHead(Head):
    """Leaf parameters: leaf_weight [n, r, V, D] in position order."""

    component_dims: ClassVar = {**Head.component_dims, "leaf_weight": (1,)}
    noise_in = "leaf_weight"

    def add_leaves(self) -> None:
        n, r = self.circuit.window, self.circuit.num_components
        self.leaf_weight = nn.Parameter(torch.empty(n, r, self.vocab_size, self.hidden_size))

    def reset_leaves(self) -> None:
        self.leaf_weight.normal_().mul_(INIT_STD)

    @torch.no_grad()
    def init_from_lm_head(self, weight: Tensor, seed: int) -> None:
        """Start every position and component at the target's lm_head[V, D], told apart by seeded noise.

        `weight` may also be [n, 1, V, D], one unembedding per position (`vllm_mtpc.heads.init` makes that of targets
        with several prediction heads, and checks sizes).
        """
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.leaf_weight.shape, generator=generator) * INIT_STD
        self.leaf_weight.copy_(weight + noise.to(weight))

    def leaf_logits(self, prepared: Tensor, start: int, stop: int) -> Tensor:
        # One product for all positions: serving reads every leaf weight once per step.
        logits = F.linear(prepared, self.leaf_weight[start:stop].reshape(-1, self.hidden_size))
        return logits.view(prepared.shape[0], stop - start, -1, self.vocab_size).float()
