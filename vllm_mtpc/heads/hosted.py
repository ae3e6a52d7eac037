"""Leaves on the states of a drafter that another model has: native MTP layers, EAGLE-3, DFlash or DSpark.

    states, of vLLM's drafter after the step:   [Q, D]; Q = 1 (MTP, EAGLE-3) or n - 1
    state of position k = 2 .. n:               s_k = s + U[k] silu(P[k] s),   s = state k - 1, or the only one
    leaf[k, z, :] = log_softmax(lm_head(s_k) + (A[k, z] s_k) B[k])

The drafter's states are conditioned on x_1, so the leaf of x_1 is the same for every component. U and B start at zero:
the untrained leaf of x_2 (of every position where Q = n - 1) is the drafter's own distribution. The lm_head is the
drafter's, the target's in most checkpoints; drafter and lm_head are neither trained nor saved with the head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mtpc.heads.shared import BorrowedLmHead
from vllm_mtpc.kernels.low_rank import LowRank

# In a list of the target's layers whose states are read: not a layer, but the drafter, whose states come in its place.
DRAFTER = -1


class WindowStatesHead(BorrowedLmHead):
    """A head whose `hidden` is [B, Q, D], states after x_1 was read, not h [B, D]."""

    def sum_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As in Head, from the first state; [B, D] is one state of each window, too."""
        return super().sum_logits(hidden.reshape(len(hidden), -1, self.hidden_size)[:, 0])

    def unembed(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """As in BorrowedLmHead; the leaf of x_1 is the same for every token and component."""
        drafted = super().unembed(hidden, max(1, start), stop)
        return drafted if start else F.pad(drafted, (0, 0, 0, 0, 1, 0))

    def draft_leaves(self, hidden: Tensor, first: Tensor, num_drafts: int) -> tuple[Tensor, Tensor, LowRank | None]:
        """As in BorrowedLmHead."""
        evidence = torch.zeros(len(hidden), self.circuit.num_components, device=hidden.device)  # equal for all z
        return evidence, *self.base_leaves(hidden, 1, num_drafts + 1)


class HostedHead(WindowStatesHead):
    """Leaf parameters: down_weight [n - 1, m, D] (P), up_weight [n - 1, D, m] (U), and those of BorrowedLmHead."""

    noise_in = "component_in"

    def add_leaves(self, expander_rank: int, component_rank: int = 0) -> None:
        """As in Head."""
        shape = self.circuit.window - 1, expander_rank, self.hidden_size
        self.down_weight = nn.Parameter(torch.empty(shape))
        self.up_weight = nn.Parameter(torch.empty(shape).mT.contiguous())
        self.add_components(component_rank if self.circuit.num_components > 1 else 0)

    def reset_leaves(self) -> None:
        """As in Head."""
        self.down_weight.normal_().mul_(self.hidden_size**-0.5)  # keeps the size of the state
        self.up_weight.zero_()
        self.reset_components()
        if self.component_rank:
            self.component_out.zero_()

    def states(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """As in BorrowedLmHead, for positions after x_1."""
        positions = slice(start - 1, stop - 1)
        rows = hidden.view(len(hidden), -1, self.hidden_size).expand(-1, self.circuit.window - 1, -1)[:, positions]
        low = F.silu(torch.einsum("bkd,kmd->bkm", rows, self.down_weight[positions]))
        return (rows + torch.einsum("bkm,kdm->bkd", low, self.up_weight[positions]))[:, :, None]
