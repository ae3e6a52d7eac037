"""Leaves that read the target's own lm_head, with a small expander per position and component before it.

    state[k, z] = s_k + U[k, z] silu(P[k] s_k)      leaf[k, z, :] = log_softmax(lm_head(state[k, z]))

P [n, m, D] projects to m = expander_rank numbers per position, U [n, r, D, m] back to D per component; U starts as
small noise. With V = 128,256, D = 4096, n = r = 8 and m = 64 these are 18.9M parameters, of leaves of their own
33.6 billion, so subword vocabularies need these. A trunk with a state for each position needs no expander.

Components may also be low-rank differences over one row of the lm_head per position; then U is [n, 1, D, m]:

base[k] = lm_head(state[k])        leaf[k, z, :] = log_softmax(base[k] + (A[k, z] state[k]) B[k])

A [n, r, R_c, D]: `component_in`; B [n, R_c, columns]: `component_out`. A position costs one row of the lm_head and
r R_c V more products; components with separate states cost r rows, r D V. B starts as small noise and A at the size of
the state: leaves start near the base, and both have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.leaves.base import INIT_STD, Leaves, LeavesOptions
from vllm_mtpc.heads.sections import FEW_IDS, MAX_WIDTH
from vllm_mtpc.kernels.leaf import LowRank


class LmHeadOptions(LeavesOptions):
    """Section of `config.json`."""

    kind: Literal["lm_head"] = Field(description="the target's lm_head")
    expander_rank: int = Field(
        ge=0, le=MAX_WIDTH, description="width of the expander of each position (default: 64; 0 with a backbone)"
    )
    component_rank: int = Field(
        ge=0, le=MAX_WIDTH,
        description="rank of the differences between components that share a row of the lm_head; 0: r rows (default: "
        f"16, and 0 up to {FEW_IDS:,} ids)",
    )  # fmt: skip

    @classmethod
    def defaults(cls, target: Any) -> dict[str, Any]:
        return {"token_rank": 0, "expander_rank": 64, "component_rank": 16 if target["vocab_size"] > FEW_IDS else 0}


class LmHeadLeaves(Leaves):
    """Parameters: down_weight [n - skip, m, D] (P), up_weight [n - skip, r or 1, D, m] (U), component_in and _out.

    The lm_head is bound, neither trained nor saved.
    """

    Options = LmHeadOptions
    needs_lm_head = True
    component_dims: ClassVar = {"up_weight": (1,), "component_in": (1,)}

    def __init__(self, options: LmHeadOptions, *sizes: Any) -> None:
        super().__init__(options, *sizes)
        self._lm_head: tuple[Callable[[Tensor], Tensor], ...] = ()  # in a tuple: neither submodule nor parameter
        n, r, width, rank = self.num_leaves, self.num_components, self.hidden_size, options.expander_rank
        self.component_rank = options.component_rank if r > 1 else 0
        if rank:
            self.down_weight = nn.Parameter(torch.empty(n, rank, width))
            self.up_weight = nn.Parameter(torch.empty(n, 1 if self.component_rank else r, width, rank))
        if self.component_rank:
            self.component_in = nn.Parameter(torch.empty(n, r, self.component_rank, width))
            self.component_out = nn.Parameter(torch.empty(n, self.component_rank, self.columns))
        self.noise_in = "component_in" if self.component_rank else "up_weight"

    @torch.no_grad()
    def reset_parameters(self, at_states: bool = False) -> None:
        """As in Leaves; at_states: the leaves start at the lm_head on the states themselves."""
        super().reset_parameters()
        if self.options.expander_rank:
            self.down_weight.normal_().mul_(self.hidden_size**-0.5)  # keeps the size of a state
            self.up_weight.normal_().mul_(0 if at_states else INIT_STD)
        if self.component_rank:
            self.component_in.normal_().mul_(self.hidden_size**-0.5)
            self.component_out.normal_().mul_(0 if at_states else INIT_STD)

    def bind_lm_head(self, logits: Callable[[Tensor], Tensor]) -> None:
        """Set the target's lm_head: states [..., D] of any float dtype -> [..., columns]."""
        self._lm_head = (logits,)

    def lm_head(self, states: Tensor) -> Tensor:
        """Return the target's logits [..., columns] of states [..., D]; raises HeadConfigError if none is bound."""
        if not self._lm_head:
            raise HeadConfigError(
                "leaves 'lm_head' read the target's lm_head and none is bound; call head.leaves.bind_lm_head(...)"
            )
        return self._lm_head[0](states)

    def states(self, states: Tensor, start: int, stop: int) -> Tensor:
        """Return the inputs of lm_head at positions start to stop - 1: [B, k, r, D], or [B, k, 1, D] with a rank."""
        rows, at = self.rows_of(states, start, stop), slice(start - self.skip, stop - self.skip)
        if not self.options.expander_rank:
            return rows.expand(-1, stop - start, -1)[:, :, None]
        down = self.down_weight[at]
        if rows.shape[1] == 1:
            low = F.linear(rows[:, 0], down.reshape(-1, self.hidden_size)).view(len(rows), stop - start, -1)
        else:
            low = torch.einsum("bkd,kmd->bkm", rows, down)
        return rows[:, :, None] + torch.einsum("bkm,kzdm->bkzd", F.silu(low), self.up_weight[at])

    def base(self, states: Tensor, start: int, stop: int) -> tuple[Tensor, LowRank | None]:
        read = self.states(states, start, stop)
        base = self.lm_head(read)
        if not self.component_rank:
            return base, None
        at = slice(start - self.skip, stop - self.skip)
        low = torch.einsum("bkd,kzcd->kbzc", read[:, :, 0], self.component_in[at]).transpose(0, 1)
        return base, LowRank(low, self.component_out[at])

    def draft(self, states: Tensor, first: Tensor, stop: int) -> tuple[Tensor | None, Tensor, LowRank | None]:
        """As in Leaves, but the leaf begins with that of x_1, and there is no evidence."""
        return None, *self.base(states, 0, stop)
