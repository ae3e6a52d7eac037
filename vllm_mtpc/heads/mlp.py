"""MLP head: residual blocks per position and component, then an unembedding each (MtPC paper, section 4).

x <- x + silu(A[l, k, z] x + c[l, k, z])   for l = 1 .. expander_layers, from x = h
leaf[k, z, :] = log_softmax(U[k, z] x)

Blocks start at zero, where silu is too: a new head is the linear one.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mtpc.heads.linear import LinearHead


class MlpHead(LinearHead):
    """Leaf parameters: block_weight [L, n, r, D, D], block_bias [L, n, r, D] and leaf_weight [n, r, V, D]."""

    component_dims: ClassVar = {**LinearHead.component_dims, "block_weight": (2,), "block_bias": (2,)}

    def add_leaves(self, expander_layers: int) -> None:
        super().add_leaves()
        shape = (expander_layers, self.circuit.window, self.circuit.num_components, self.hidden_size)
        self.block_weight = nn.Parameter(torch.empty(*shape, self.hidden_size))
        self.block_bias = nn.Parameter(torch.empty(shape))

    def reset_leaves(self) -> None:
        super().reset_leaves()
        self.block_weight.zero_()
        self.block_bias.zero_()

    def states(self, prepared: Tensor, start: int, stop: int) -> Tensor:
        n, r = stop - start, self.circuit.num_components
        state = prepared[:, None, None].expand(-1, n, r, -1)  # [B, k, z, D]
        for weight, bias in zip(self.block_weight[:, start:stop], self.block_bias[:, start:stop], strict=True):
            state = state + F.silu(torch.einsum("bkzd,kzed->bkze", state, weight) + bias)
        return state
