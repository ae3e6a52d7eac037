"""No trunk: leaves and sums read the target's last hidden state h (MtPC paper, section 4)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from vllm_mtpc.heads.sections import Section
from vllm_mtpc.heads.trunk.base import Trunk


class NoOptions(Section):
    """Section of `config.json`."""

    kind: Literal["none"] = Field(description="the target's last hidden state")


class NoTrunk(Trunk):
    """Returns h."""

    Options: ClassVar[type[Section]] = NoOptions

    def forward(self, hidden: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """As in Trunk, for hidden [B, D]."""
        return hidden, hidden[:, None]
