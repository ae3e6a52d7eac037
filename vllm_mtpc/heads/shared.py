"""Shared head: a small expander per position and component in front of the target's own lm_head.

state[k, z] = h + U[k, z] silu(P[k] h)      leaf[k, z, :] = log_softmax(lm_head(state[k, z]))

P [n, m, D] goes down to m = expander_rank numbers per position, U [n, r, D, m] up again per component. U starts as
small noise, so every leaf starts at the target's own distribution of the next token, and components are told
apart. The lm_head is the target's: it is bound to the head, never trained with it, and not in the checkpoint.

Parameters, V=128k (128,256), D=4096, n=8, r=8, m=64: n*m*D + n*r*D*m = 18.9M. The linear head's n*r*V*D are 33.6
billion: subword vocabularies need this head. The price is arithmetic, not memory traffic: the lm_head is read once per
step and multiplied with n*r states of each request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.base import INIT_STD, Head
from vllm_mtpc.kernels import leaf
from vllm_mtpc.kernels.shard import Shard


class SharedHead(Head):
    """Leaf parameters: down_weight [n, m, D] and up_weight [n, r, D, m], in position order."""

    needs_lm_head = True
    component_dims: ClassVar = {**Head.component_dims, "up_weight": (1,)}
    noise_in = "up_weight"

    def add_leaves(self, expander_rank: int) -> None:
        n, r, hidden_size = self.circuit.window, self.circuit.num_components, self.hidden_size
        self.down_weight = nn.Parameter(torch.empty(n, expander_rank, hidden_size))
        self.up_weight = nn.Parameter(torch.empty(n, r, hidden_size, expander_rank))
        self._lm_head: tuple[Callable[[Tensor], Tensor], ...] = ()  # in a tuple: no submodule, no parameter of ours

    def reset_leaves(self) -> None:
        self.down_weight.normal_().mul_(self.hidden_size**-0.5)  # keeps the size of h
        self.up_weight.normal_().mul_(INIT_STD)

    def bind_lm_head(self, logits: Callable[[Tensor], Tensor], shard: Shard | None = None) -> None:
        """Lend the target's lm_head: hidden[..., D] of any float dtype -> logits[..., V], or [..., shard.rows]."""
        self._lm_head, self.leaf_shard = (logits,), shard

    def draft_leaves(self, prepared: Tensor, first: Tensor, num_drafts: int) -> tuple[Tensor, Tensor]:
        shard = self.leaf_shard
        if shard is None:
            return super().draft_leaves(prepared, first, num_drafts)
        logits = self.unembed(prepared, 0, num_drafts + 1)
        own = logits[:, 0, :, : shard.stop - shard.start]
        return shard.evidence(leaf.terms_of(own, first - shard.start)), logits[:, 1:]

    def unembed(self, prepared: Tensor, start: int, stop: int) -> Tensor:
        """As in Head; raises HeadConfigError where no lm_head is bound."""
        if not self._lm_head:
            raise HeadConfigError(
                "head 'shared' has no lm_head of its own and none is bound; call head.bind_lm_head(target.logits)"
            )
        down = F.linear(prepared, self.down_weight[start:stop].reshape(-1, self.hidden_size))
        low = F.silu(down).view(prepared.shape[0], stop - start, -1)  # [B, k, m]
        change = torch.einsum("bkm,kzdm->bkzd", low, self.up_weight[start:stop])
        return self._lm_head[0](prepared[:, None, None] + change)
