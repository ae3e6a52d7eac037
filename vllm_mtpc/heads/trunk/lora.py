"""LoRA draft layers: copies of the target's last layers with adapters, which the head reads (MtPC paper, section 3.3).

              the first N - K layers, frozen, run once
        ┌───────────────┴──────────────┐
   draft: the last K layers      plain: the last K layers
   with LoRA, final norm         as they are, final norm
        │                              │
    head reads it                 lm_head reads it

The draft layers share the target's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from vllm_mtpc.errors import HeadConfigError
from vllm_mtpc.heads.adapters import AdaptedLayers, Adapters, layered_backbone, sharing_copy, view_of
from vllm_mtpc.heads.sections import Section
from vllm_mtpc.heads.trunk.base import NoTrunk

ALLOWED_LAYERS = (1, 2, 4)


class LoraOptions(Section):
    """Section of `config.json`."""

    kind: Literal["lora"] = Field(description="the target's last layers with adapters")
    layers: Literal[1, 2, 4] = Field(description="last layers of the target that get adapters (default: 2)")
    rank: int = Field(ge=1, le=4096, description="rank of the adapters (default: 16)")
    alpha: float = Field(gt=0, allow_inf_nan=False, description="scale of the adapters, by their rank (default: 16)")

    @classmethod
    def defaults(cls, target: Mapping[str, Any]) -> dict[str, Any]:
        return {"layers": 2, "rank": 16, "alpha": 16.0}


class LoraTrunk(NoTrunk):
    """Returns the states of `LoraDraftLayers`, which run over whole texts; saved apart, as PEFT's files."""

    Options = LoraOptions


class LoraDraftLayers(AdaptedLayers):
    """The last K layers of a `vllm_mtpc.hf.Target` with LoRA, its only parameters.

    B starts at 0: drafts read the target's own states. Raises HeadConfigError for a target with too few layers, or with
    layers that cannot be separated.
    """

    def __init__(self, target: Any, layers: int, rank: int = 16, alpha: float = 16) -> None:
        super().__init__(target)
        backbone = layered_backbone(target)
        total, first = len(backbone.layers), len(backbone.layers) - layers
        if first < 1:
            raise HeadConfigError(
                f"lora_layers={layers} of target {target.name} with {total} layers: allowed are fewer than {total}; "
                "lower lora_layers"
            )
        below, last = backbone.layers[:first], backbone.layers[first:]
        skipped = [_Skip(layer) for layer in below]
        draft = view_of(backbone, [*skipped, *map(sharing_copy, last)])
        self.adapt(draft, rank, alpha, list(range(first, total)))
        self._entry = (skipped[0],)
        self._views = {  # in a dict: not submodules
            "trunk": view_of(backbone, [*below, *map(_Skip, last)], norm=nn.Identity()),
            "draft": draft,
            "plain": view_of(backbone, [*skipped, *last]),
        }

    @torch.no_grad()
    def trunk(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the input [B, S, D] of the last K layers; arguments as in `Target.hidden`."""
        return self._run("trunk", documents, input_ids=tokens.to(self.target.device, torch.long))

    def draft(self, trunk: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the states [B, S, D] after the draft layers and the final norm, with gradients to the adapters."""
        return self._last_layers("draft", trunk, documents)

    @torch.no_grad()
    def plain(self, trunk: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the target's own states [B, S, D], bit for bit those of `Target.hidden`."""
        return self._last_layers("plain", trunk, documents)

    @classmethod
    def load(cls, adapters: Adapters, target: Any) -> LoraDraftLayers:
        """Return draft layers with the adapters of a head (`checkpoint.load.read_adapters`); raises as `take_lora`."""
        split = cls(target, adapters.num_layers, adapters.rank, adapters.alpha)
        split.take_lora(adapters.tensors)
        return split

    def _last_layers(self, view: str, trunk: Tensor, documents: Tensor | None) -> Tensor:
        self._entry[0].states = trunk  # replaces the embeddings after the model has processed them (Gemma scales them)
        try:
            return self._run(view, documents, inputs_embeds=trunk)
        finally:
            self._entry[0].states = None

    def _run(self, view: str, documents: Tensor | None, **tokens: Tensor) -> Tensor:
        return self._views[view](**tokens, use_cache=False, **self.target.packed(documents)).last_hidden_state


class _Skip(nn.Module):
    """A layer that returns its input, or `states` if they are set."""

    states: Tensor | None = None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        if hasattr(layer, "attention_type"):  # some models choose a layer's mask by it
            self.attention_type = layer.attention_type

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states if self.states is None else self.states
