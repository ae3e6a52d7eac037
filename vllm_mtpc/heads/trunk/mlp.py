"""A gated MLP of h and the embedding of x_1, added to h: what Hydra is to Medusa (arXiv 2402.05109).

    s_0 = h        s_(l+1) = s_l + W_down (silu(a) * b),   (a, b) = W_in [norm(s_l), norm(E[x_1])],   l < layers

E is the target's embedding, borrowed. W_down starts at zero: the untrained states are h. A state depends on h and x_1
alone, so a server keeps nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vllm_mtpc.heads.sections import MAX_WIDTH, Section
from vllm_mtpc.heads.trunk.base import Trunk

EPS = 1e-6  # of the norms


class MlpOptions(Section):
    """Section of `config.json`."""

    kind: Literal["mlp"] = Field(description="a gated MLP of h and the embedding of x_1")
    width: int = Field(ge=1, le=MAX_WIDTH, description="width of the gated MLP (default: the hidden size)")
    layers: Literal[1, 2] = Field(description="gated MLPs in a row, 1 or 2 (default: 1)")

    @classmethod
    def defaults(cls, target: Mapping[str, Any]) -> dict[str, Any]:
        return {"width": target["hidden_size"], "layers": 1}


class GatedMlp(nn.Module):
    """One MLP: in_proj [2 W, 2 D], out_proj [D, W] and two norms."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.state_norm, self.first_norm = (nn.RMSNorm(hidden_size, EPS) for _ in range(2))
        self.in_proj = nn.Linear(2 * hidden_size, 2 * width, bias=False)
        self.out_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Return states [B, D] plus the MLP of them and of the embeddings [B, D] of x_1."""
        both = torch.cat([self.state_norm(states), self.first_norm(embedded)], -1)
        gate, up = self.in_proj(both).chunk(2, -1)
        return states + self.out_proj(F.silu(gate) * up)


class MlpTrunk(Trunk):
    """Parameters: `mlps.N.*`."""

    Options = MlpOptions
    sees_first = needs_embedding = True

    def __init__(self, options: MlpOptions, window: int, hidden_size: int) -> None:
        super().__init__(options, window, hidden_size)
        self.mlps = nn.ModuleList(GatedMlp(hidden_size, options.width) for _ in range(options.layers))

    def forward(self, hidden: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """As in Trunk, for hidden [B, D]."""
        assert first is not None  # `sees_first`
        states, embedded = hidden, self.embed(first).to(hidden.dtype)
        for mlp in self.mlps:
            states = mlp(states, embedded)
        return states, states[:, None]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for mlp in self.mlps:
            mlp.out_proj.weight.zero_()
