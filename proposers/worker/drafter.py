"""The lm_head of a drafter's MTP layers, and the states that it multiplies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.logits_processor import LogitsProcessor


class DrafterLmHead(nn.Module):
    """The lm_head of a model of vLLM without the norm that some (DeepSeek, GLM) apply in `compute_logits`.

    Args:
        model: the drafter.
        hidden_size: of its states.
        dtype: of its states.
    """

    def __init__(self, model: nn.Module, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = (model,)  # in a tuple: no submodule
        self.processor = next(part for part in model.modules() if isinstance(part, LogitsProcessor))
        calls: list[tuple[Any, ...]] = []
        with self.processor.register_forward_pre_hook(lambda _, args: calls.append(args)):
            model.compute_logits(torch.zeros(1, hidden_size, dtype=dtype, device=next(model.parameters()).device))
        self.lm_head: nn.Module = calls[0][0]

    def compute_logits(self, states: Tensor) -> Tensor:
        """Return the logits of normalised states [R, D]."""
        return self.processor(self.lm_head, states)

    def normalised(self, states: Tensor) -> Tensor:
        """Return what the lm_head multiplies for states [R, D] of the drafter's forward pass."""
        self.processor.forward = lambda lm_head, states, *args, **kwargs: states
        try:
            return self.model[0].compute_logits(states)
        finally:
            del self.processor.forward
