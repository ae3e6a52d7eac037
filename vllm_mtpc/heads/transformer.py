"""Transformer head: blocks over the window's positions, then an unembedding per position and component.

x[k] = h + query[k];  x <- blocks(x), pre-norm, attention among the n positions of one window
leaf[k, z, :] = log_softmax(U[k, z] x[k])

Difference from the MtPC paper (section 4): its expander attends over the text's hidden states, and needs a KV cache of
its own when it is served. This one attends within the window only. All it reads is h, so it is served like every other
head, without state between steps. Attention is full: positions hold queries, no tokens that could leak.

Blocks start as the identity and queries near zero: a new head is nearly the linear one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllm_mtpc.heads.base import INIT_STD
from vllm_mtpc.heads.linear import LinearHead

FEEDFORWARD = 4  # width of a block's MLP in hidden sizes


class TransformerHead(LinearHead):
    """Leaf parameters: query [n, D], `expander_layers` blocks of torch's TransformerEncoderLayer, leaf_weight."""

    def add_leaves(self, expander_layers: int, expander_heads: int) -> None:
        super().add_leaves()
        self.query = nn.Parameter(torch.empty(self.circuit.window, self.hidden_size))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                self.hidden_size,
                expander_heads,
                FEEDFORWARD * self.hidden_size,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(expander_layers)
        )

    def reset_leaves(self) -> None:
        super().reset_leaves()
        self.query.normal_().mul_(INIT_STD)
        for block in self.blocks:  # the other weights of a block stay as torch draws them
            for output in (block.self_attn.out_proj, block.linear2):
                output.weight.zero_()
                output.bias.zero_()

    def prepare(self, hidden: Tensor) -> Tensor:
        """States [B, n, D] of the window's positions."""
        states = hidden[:, None] + self.query
        for block in self.blocks:
            states = block(states)
        return states

    def states(self, prepared: Tensor, start: int, stop: int) -> Tensor:
        return prepared[:, start:stop, None]
