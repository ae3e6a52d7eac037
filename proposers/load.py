"""The head in a worker: loaded beside the target, and lent the target's lm_head where it needs one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vllm_mtpc.checkpoint import load_head
from vllm_mtpc.heads.base import Head


def load_served_head(
    folder: str, dtype: torch.dtype, device: torch.device, target_model: nn.Module, target_dtype: torch.dtype
) -> Head:
    """The head of a folder, its weights in `dtype` on `device`; `target_model` is vLLM's, whose lm_head it may read."""
    config, head = load_head(folder, dtype, device)
    if head.needs_lm_head:
        head.bind_lm_head(_lm_head(target_model, target_dtype, config.vocab_size))
    return head


def _lm_head(target_model: nn.Module, target_dtype: torch.dtype, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """vLLM's `compute_logits` for states [..., D]: logits [..., V], with the model's scale and soft cap.

    Under tensor parallelism vLLM gathers the logits on every rank (Platform.use_all_gather), so every rank drafts from
    the same numbers. States take the dtype of the target's own; a quantised or padded lm_head is vLLM's business, and
    padding beyond V is cut.
    """

    def logits(states: Tensor) -> Tensor:
        flat = target_model.compute_logits(states.reshape(-1, states.shape[-1]).to(target_dtype))
        return flat[:, :vocab_size].view(*states.shape[:-1], vocab_size)

    return logits
