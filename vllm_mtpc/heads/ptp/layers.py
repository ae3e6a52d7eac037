"""The weights of a PTP head."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from vllm_mtpc.heads.ptp.embedding import AuxEmbedding
from vllm_mtpc.heads.ptp.late import LateNetwork


class PtpLayers(AuxEmbedding):
    """The embedding of u, which `forward` computes, and the network `late` of variant late, else None; untrained.

    Args:
        config: the head's PtpConfig.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.u_features)
        self.late = LateNetwork(config.hidden_size, config.late_width) if config.late_width else None


class PtpHead(NamedTuple):
    """A PTP head as it is on disk; `checkpoint.load_student` puts it on its target."""

    config: Any  # PtpConfig
    lora: dict[str, Tensor]  # by PEFT's names ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    layers: PtpLayers
