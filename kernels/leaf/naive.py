"""Logits of leaves in plain PyTorch: the definition that kernels are checked against, and the CPU's path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(states: Tensor, weight: Tensor) -> Tensor:
    """Return states [B, D] times weight [k, r, V, D]: [B, k, r, V], in the dtype of the states."""
    return F.linear(states, weight.flatten(0, 2)).view(len(states), *weight.shape[:3])


def evidence_of(logits: Tensor, token: Tensor) -> Tensor:
    """Return log p(token | z) [B, r] float32 of logits [B, r, V] and token [B] int64 in 0 .. V - 1."""
    log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
    return log_probs.gather(2, token[:, None, None].expand(-1, logits.shape[1], 1))[..., 0]


def terms_of(logits: Tensor, token: Tensor) -> Tensor:
    """Return the log-normaliser and the token's logit, [B, 2, r] float32, of logits [B, r, V] and token [B] int64."""
    if not logits.shape[-1]:  # a rank without tokens
        return logits.new_full((len(logits), 2, logits.shape[1]), -torch.inf, dtype=torch.float32)
    logits, vocab_size = logits.float(), logits.shape[-1]
    index = token.clamp(0, vocab_size - 1)[:, None, None].expand(-1, logits.shape[1], 1)
    is_outside = (token < 0) | (token >= vocab_size)
    picked = logits.gather(2, index)[..., 0].masked_fill(is_outside[:, None], -torch.inf)
    return torch.stack([logits.logsumexp(dim=-1), picked], dim=1)


def terms(states: Tensor, weight: Tensor, token: Tensor) -> Tensor:
    """Return `terms_of` the logits of one position; states [B, D], weight [r, V, D]."""
    return terms_of(logits(states, weight[None])[:, 0], token)
