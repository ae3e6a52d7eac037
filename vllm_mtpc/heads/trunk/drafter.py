"""The states of a drafter that another model has: native MTP layers, EAGLE-3, DFlash or DSpark.

States of vLLM's drafter after the step: [Q, D], Q = 1 (MTP, EAGLE-3) or n - 1, conditioned on x_1. The untrained leaf
of x_2 (of every position where Q = n - 1) is the drafter's own distribution. The lm_head is the drafter's, the target's
in most checkpoints; drafter and lm_head are neither trained nor saved with the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.sections import Section
from vllm_mtpc.heads.trunk.base import Trunk

# In a list of the target's layers whose states are read: not a layer, but the drafter, whose states come in its place.
DRAFTER = -1


class DrafterOptions(Section):
    """Section of `config.json`."""

    kind: Literal["drafter"] = Field(description="the states of a drafter that vLLM serves")
    method: Literal["mtp", "eagle3", "dflash", "dspark"] = Field(description="vLLM's method (default: mtp)")
    model: str | None = Field(
        None, description="its checkpoint: hub name, or path from the head (default: the target's)"
    )

    @classmethod
    def defaults(cls, target: Mapping[str, Any]) -> dict[str, Any]:
        return {"method": "mtp"}

    @property
    def has_block(self) -> bool:
        """Whether one pass gives a state for every draft, not for the first one alone."""
        return self.method in ("dflash", "dspark")

    def place(self, folder: Path) -> str | None:
        """Return its checkpoint, a folder by its path from the head's or a hub name; None: the target's."""
        path = folder / (self.model or "")
        if self.model and self.model.startswith((".", "/")) and not path.is_dir():
            raise HeadConfigError(f"drafter: no folder {path.resolve()}; copy the checkpoint there, or correct model")
        return str(path.resolve()) if self.model and path.is_dir() else self.model

    def serving(self, folder: Path, num_drafts: int = 1) -> dict[str, Any]:
        """Return vLLM's own `speculative_config` of the drafter."""
        options = {"method": self.method, "num_speculative_tokens": num_drafts, "draft_sample_method": "greedy"}
        return options | ({"model": place} if (place := self.place(folder)) else {})


class DrafterTrunk(Trunk):
    """Returns the states of the drafter, which come before the target's."""

    Options = DrafterOptions
    sees_first = predicts_drafts = True
    aux_layers = (DRAFTER,)

    def __init__(self, options: DrafterOptions, window: int, hidden_size: int) -> None:
        super().__init__(options, window, hidden_size)
        self.is_per_position = options.has_block

    def forward(self, hidden: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        """As in Trunk, for states [B, Q, D], or [B, D] where Q = 1."""
        states = hidden.reshape(len(hidden), -1, self.hidden_size)
        return states[:, 0], states
