"""Shared head: a small expander per position and component in front of the target's own lm_head.

state[k, z] = h + U[k, z] silu(P[k] h)      leaf[k, z, :] = log_softmax(lm_head(state[k, z]))

P [n, m, D] projects to m = expander_rank numbers per position, U [n, r, D, m] back to D per component; U starts as
small noise. With V = 128,256, D = 4096, n = r = 8 and m = 64 these are 18.9M parameters, of a linear head 33.6 billion,
so subword vocabularies need this head. The lm_head is multiplied with n*r states of each request, with component_rank
with n: U is [n, 1, D, m], and components are added after the lm_head (components.py).
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mtpc.heads.base import INIT_STD, Head
from vllm_mtpc.heads.components import BorrowedLmHead


class SharedHead(BorrowedLmHead):
    """Leaf parameters: down_weight [n, m, D] (P) and up_weight [n, r or 1, D, m] (U), and those of BorrowedLmHead."""

    component_dims: ClassVar = {**Head.component_dims, "up_weight": (1,)}
    noise_in = "up_weight"

    def add_leaves(self, expander_rank: int, component_rank: int = 0) -> None:
        """As in Head."""
        n, hidden_size = self.circuit.window, self.hidden_size
        states = 1 if component_rank else self.circuit.num_components
        self.down_weight = nn.Parameter(torch.empty(n, expander_rank, hidden_size))
        self.up_weight = nn.Parameter(torch.empty(n, states, hidden_size, expander_rank))
        self.add_components(component_rank)

    def reset_leaves(self) -> None:
        """As in Head."""
        self.down_weight.normal_().mul_(self.hidden_size**-0.5)  # keeps the size of h
        self.up_weight.normal_().mul_(INIT_STD)
        self.reset_components()

    def states(self, prepared: Tensor, start: int, stop: int) -> Tensor:
        """As in BorrowedLmHead."""
        down = F.linear(prepared, self.down_weight[start:stop].reshape(-1, self.hidden_size))
        low = F.silu(down).view(prepared.shape[0], stop - start, -1)  # [B, k, m]
        change = torch.einsum("bkm,kzdm->bkzd", low, self.up_weight[start:stop])
        return prepared[:, None, None] + change
