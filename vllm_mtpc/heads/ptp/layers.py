"""The weights of a PTP head: the embedding of u in [0, 1), which rows carry in place of a token's, and a late network.

    e_i = 1{u <= i / n}, i = 1 .. n, then a linear layer

"Threshold" of the PTP paper (arXiv 2512.21323, appendix C.1); none of its others was better (benchmarks/PAPERS.md). u
is used in float32 for weights of any dtype: in half precision two values on either side of an edge are equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vllm_mtpc.heads.ptp.late import LateNetwork


class PtpLayers(nn.Module):
    """The embedding of u, which `forward` computes, and the network `late` of variant late, else None; untrained.

    Args:
        config: the head's PtpConfig.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.outer = nn.Linear(config.u_features, config.hidden_size)
        self.late = LateNetwork(config.hidden_size, config.late_width) if config.late_width else None

    def forward(self, u: Tensor) -> Tensor:
        """Return the embeddings, [..., D] in the dtype of the weights, of u [...]."""
        count, weight = self.outer.in_features, self.outer.weight
        with torch.autocast(u.device.type, enabled=False):
            ends = torch.arange(1, count + 1, device=u.device).float() / count
            features = (u.float()[..., None] <= ends).float()  # [..., n]
            return F.linear(features, weight.float(), self.outer.bias.float()).to(weight.dtype)


class PtpHead(NamedTuple):
    """A PTP head as it is on disk; `checkpoint.load_student` puts it on its target."""

    config: Any  # PtpConfig
    lora: dict[str, Tensor]  # by PEFT's names ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    layers: PtpLayers
