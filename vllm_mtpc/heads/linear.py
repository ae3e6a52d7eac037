"""Linear head: one unembedding per position and component, sum weights linear in the hidden state.

leaf[k, z, :] = log_softmax(U[k, z] h)      root = log_softmax(R h)
inner[f, z, :] = log_softmax(W[f, z] h + b[f, z])                      (MtPC paper, section 4)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mtpc.circuits import Circuit, CircuitParams

# Probability of keeping the latent at initialisation: HMM and BTree then start (nearly) as the CP
# with the same leaves, and the softmax is not yet so saturated that its rows cannot move.
STAY_PROBABILITY = 0.95
INIT_STD = 0.01


class LinearHead(nn.Module):
    """Hidden states [B, D] -> CircuitParams of a batch of B circuits.

    Parameters: leaf_weight [n, r, V, D] in position order; root_weight [r, D] where the circuit has a
    root; inner_weight [F, r, r, D] and inner_bias [F, r, r], leaves to root (HMM: in position order).
    """

    def __init__(self, circuit: Circuit, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.circuit = circuit
        n, r, inner = circuit.window, circuit.num_components, circuit.num_inner
        self.leaf_weight = nn.Parameter(torch.empty(n, r, vocab_size, hidden_size))
        self.root_weight = nn.Parameter(torch.empty(r, hidden_size)) if circuit.has_root else None
        self.inner_weight = nn.Parameter(torch.empty(inner, r, r, hidden_size)) if inner else None
        self.inner_bias = nn.Parameter(torch.empty(inner, r, r)) if inner else None
        if not self.leaf_weight.is_meta:  # on meta, even filling a tensor imports seconds worth of torch
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Small random weights; inner sums that mostly keep the latent."""
        for weight in (self.leaf_weight, self.root_weight, self.inner_weight):
            if weight is not None:
                weight.normal_().mul_(INIT_STD)
        if self.inner_bias is not None:
            self.inner_bias.copy_(_stay_bias(self.circuit.num_components))

    @torch.no_grad()
    def init_from_lm_head(self, weight: Tensor, seed: int) -> None:
        """Start every position and component at the target's lm_head[V, D], told apart by seeded noise."""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(self.leaf_weight.shape, generator=generator) * INIT_STD
        self.leaf_weight.copy_(weight + noise.to(weight))

    def forward(self, hidden: Tensor, num_positions: int | None = None) -> CircuitParams:
        """CircuitParams from hidden[B, D]; only the first `num_positions` leaves when the tail is not needed."""
        m = num_positions or self.circuit.window
        r, batch = self.circuit.num_components, hidden.shape[0]
        vocab_size, hidden_size = self.leaf_weight.shape[2:]
        logits = F.linear(hidden, self.leaf_weight[:m].reshape(-1, hidden_size))
        leaf = logits.view(batch, m, r, vocab_size).float().log_softmax(dim=-1)
        if self.root_weight is None:
            root = leaf.new_zeros(batch, r)
        else:
            root = F.linear(hidden, self.root_weight).float().log_softmax(dim=-1)
        if self.inner_weight is None:
            return CircuitParams(leaf, root, leaf.new_zeros(batch, 0, r, r))
        inner = F.linear(hidden, self.inner_weight.reshape(-1, hidden_size)).float()
        inner = inner.view(batch, -1, r, r) + self.inner_bias.float()
        return CircuitParams(leaf, root, inner.log_softmax(dim=-1))


def _stay_bias(r: int) -> Tensor:
    if r == 1:
        return torch.zeros(1, 1)
    return torch.eye(r) * math.log(STAY_PROBABILITY * (r - 1) / (1 - STAY_PROBABILITY))
