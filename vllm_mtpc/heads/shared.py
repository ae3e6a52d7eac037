"""Leaves that read the target's own lm_head; the shared head has a small expander per position and component before it.

state[k, z] = h + U[k, z] silu(P[k] h)      leaf[k, z, :] = log_softmax(lm_head(state[k, z]))

P [n, m, D] projects to m = expander_rank numbers per position, U [n, r, D, m] back to D per component; U starts as
small noise. With V = 128,256, D = 4096, n = r = 8 and m = 64 these are 18.9M parameters, of a linear head 33.6 billion,
so subword vocabularies need this head. The lm_head is multiplied with n*r states of each request.

Components may also be low-rank differences over one row of the lm_head per position; then U is [n, 1, D, m]:

base[k] = lm_head(s_k)        leaf[k, z, :] = log_softmax(base[k] + (A[k, z] s_k) B[k])

s_k [D] is the state that lm_head reads at position k; A [n, r, R_c, D]: `component_in`; B [n, R_c, V]: `component_out`.
A position costs one row of the lm_head and r R_c V more products; components with separate states cost r rows, r D V.

B starts as small noise and A at the size of the state: leaves start near the base, and both have a gradient.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.base import INIT_STD, Head
from vllm_mtpc.kernels import leaf
from vllm_mtpc.kernels.low_rank import LowRank
from vllm_mtpc.kernels.shard import Shard


class BorrowedLmHead(Head):
    """A head whose leaves are the target's lm_head on `states`. The lm_head is bound, neither trained nor saved."""

    needs_lm_head = True

    def add_components(self, rank: int) -> None:
        """Create component_in [n, r, R_c, D] and component_out [n, R_c, V] for a rank above 0."""
        self.component_rank = rank
        self._lm_head: tuple[Callable[[Tensor], Tensor], ...] = ()  # in a tuple: neither submodule nor parameter
        if rank:
            n, r = self.circuit.window, self.circuit.num_components
            self.component_in = nn.Parameter(torch.empty(n, r, rank, self.hidden_size))
            self.component_out = nn.Parameter(torch.empty(n, rank, self.vocab_size))
            self.component_dims = {**Head.component_dims, "component_in": (1,)}  # type: ignore[misc]
            self.noise_in = "component_in"  # type: ignore[misc]

    def reset_components(self) -> None:
        """Initialise the components from torch's own generator."""
        if self.component_rank:
            self.component_in.normal_().mul_(self.hidden_size**-0.5)  # keeps the size of the state
            self.component_out.normal_().mul_(INIT_STD)

    @abstractmethod
    def states(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Return the inputs of lm_head at positions start to stop - 1: [B, k, r, D], or [B, k, 1, D] with a rank."""

    def bind_lm_head(self, logits: Callable[[Tensor], Tensor], shard: Shard | None = None) -> None:
        """Set the target's lm_head: hidden [..., D] of any float dtype -> logits [..., V], or [..., shard.rows]."""
        self._lm_head, self.leaf_shard = (logits,), shard
        if shard is not None and self.component_rank:  # every rank has as many columns
            padding = shard.rows * shard.size - self.vocab_size
            self.component_out = nn.Parameter(F.pad(self.component_out.detach(), (0, padding)), requires_grad=False)

    def undivided(self) -> Head:
        """As in Head."""
        if (shard := self.leaf_shard) is None:
            return self
        columns, head = self._lm_head[0], copy.copy(self)  # parameters of self, also when they are replaced
        head._lm_head = (lambda states: shard.whole(columns(states).flatten(0, -2)).unflatten(0, states.shape[:-1]),)
        head.leaf_shard = None
        return head

    def lm_head(self, states: Tensor) -> Tensor:
        """Return the target's logits [..., V] of states [..., D].

        Raises:
            HeadConfigError: no lm_head is bound.
        """
        if not self._lm_head:
            raise HeadConfigError(
                f"{type(self).__name__} reads the target's lm_head and none is bound; "
                "call head.bind_lm_head(target.logits)"
            )
        return self._lm_head[0](states)

    def unembed(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """As in Head, by `lm_head`."""
        base, low = self.base_leaves(hidden, start, stop)
        return base if low is None else low.leaves(base)

    def base_leaves(self, hidden: Tensor, start: int, stop: int) -> tuple[Tensor, LowRank | None]:
        """Return the leaves [B, k, r, V], or with a rank common logits [B, k, 1, V] and the differences."""
        states = self.states(hidden, start, stop)
        base = self.lm_head(states)
        if not self.component_rank:
            return base, None
        positions = slice(start, start + states.shape[1])
        begin = 0 if self.leaf_shard is None else self.leaf_shard.start
        low = self.component_states(states, positions)
        return base, LowRank(low, self.component_out[positions].narrow(2, begin, base.shape[3]))

    def component_states(self, states: Tensor, positions: slice) -> Tensor:
        """Return A[k, z] s_k [B, k, r, R_c] for states [B, k, 1, D]."""
        return torch.einsum("bkd,kzcd->kbzc", states[:, :, 0], self.component_in[positions]).transpose(0, 1)

    def draft_leaves(
        self, hidden: Tensor, first: Tensor, num_drafts: int
    ) -> tuple[Tensor | None, Tensor, LowRank | None]:
        """As in Head; with a shard the logits are this rank's columns [B, K, r, rows] and the evidence is exchanged."""
        if self.circuit.num_components == 1:
            return super().draft_leaves(hidden, first, num_drafts)
        (base, low), shard = self.base_leaves(hidden, 0, num_drafts + 1), self.leaf_shard
        if shard is None:
            return None, base, low
        at_first = base[:, :1] if low is None else low.positions(0, 1).leaves(base[:, :1])
        terms = leaf.terms_of(at_first[:, 0, :, : shard.stop - shard.start], first - shard.start)
        return shard.evidence(terms), base[:, 1:], low and low.positions(1)


class SharedHead(BorrowedLmHead):
    """Leaf parameters: down_weight [n, m, D] (P) and up_weight [n, r or 1, D, m] (U), and those of BorrowedLmHead."""

    component_dims: ClassVar = {**Head.component_dims, "up_weight": (1,)}
    noise_in = "up_weight"

    def add_leaves(self, expander_rank: int, component_rank: int = 0) -> None:
        n, hidden_size = self.circuit.window, self.hidden_size
        states = 1 if component_rank else self.circuit.num_components
        self.down_weight = nn.Parameter(torch.empty(n, expander_rank, hidden_size))
        self.up_weight = nn.Parameter(torch.empty(n, states, hidden_size, expander_rank))
        self.add_components(component_rank)

    def reset_leaves(self) -> None:
        self.down_weight.normal_().mul_(self.hidden_size**-0.5)  # keeps the size of h
        self.up_weight.normal_().mul_(INIT_STD)
        self.reset_components()

    def states(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        down = F.linear(hidden, self.down_weight[start:stop].reshape(-1, self.hidden_size))
        low = F.silu(down).view(hidden.shape[0], stop - start, -1)  # [B, k, m]
        change = torch.einsum("bkm,kzdm->bkzd", low, self.up_weight[start:stop])
        return hidden[:, None, None] + change
