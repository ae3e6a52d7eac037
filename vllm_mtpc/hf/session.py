"""A target that reads a batch of texts bit by bit, with a key-value cache that can be cut back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from vllm_mtpc.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from vllm_mtpc.hf import Target

CACHED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}  # can forget their last tokens


class Reader(Protocol):
    """What the decoding loops need of a target: read on, forget the end, next-token logits."""

    def read(self, tokens: Tensor) -> Tensor:
        """Appends tokens[B, m]; returns the post-final-norm states [B, m, D] after each of them."""

    def crop(self, forget: int) -> None:
        """Forgets the last ``forget`` tokens."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden[..., D] -> next-token logits [..., V] float32."""


class Session:
    """``Reader`` on a transformers model. Texts of different lengths stand at the right, padded at the left."""

    def __init__(self, target: Target) -> None:
        from transformers import DynamicCache

        kinds = set(getattr(target.config, "layer_types", None) or ()) - CACHED_LAYERS
        if kinds:
            raise UsageError(
                f"target {target.name} has layers of kind {', '.join(sorted(kinds))}, whose state cannot be rolled "
                "back; generation here needs attention layers only; measure this head with vLLM instead"
            )
        self.target = target
        # Without the model's config every layer keeps all tokens, so that a sliding window can be cut back as well.
        self.cache = DynamicCache()
        self.mask: Tensor | None = None  # [B, tokens so far] where texts are padded

    def start(self, prompts: Sequence[Tensor]) -> Tensor:
        """Reads prompts (1-D, at least one token each); returns their states [B, P, D], padded at the left."""
        if any(len(prompt) == 0 for prompt in prompts):
            raise UsageError("an empty prompt has no hidden state to draft from; give it at least one token")
        longest = max(len(prompt) for prompt in prompts)
        tokens = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        if (lengths < longest).any():
            self.mask = (torch.arange(longest) >= longest - lengths[:, None]).long().to(self.target.device)
        return self._forward(tokens, self.mask)

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> Tensor:
        if self.mask is not None:
            self.mask = torch.cat([self.mask, torch.ones_like(tokens).to(self.mask)], 1)
        return self._forward(tokens, self.mask)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        padded = {}
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            padded = {"attention_mask": mask, "position_ids": positions}
        tokens = tokens.to(self.target.device, torch.long)
        output = self.target.backbone(input_ids=tokens, past_key_values=self.cache, use_cache=True, **padded)
        return output.last_hidden_state

    def crop(self, forget: int) -> None:
        if forget:
            self.cache.crop(-forget)  # negative: so many tokens fewer, in every release of transformers 5
            self.mask = None if self.mask is None else self.mask[:, :-forget]

    def logits(self, hidden: Tensor) -> Tensor:
        return self.target.logits(hidden)
