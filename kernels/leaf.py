"""Evidence of x_1, which the target has sampled, from the logits of a leaf.

The parts of a vocabulary that is divided over ranks add up in two numbers (`terms_of`): log-normalisers by log-sum-exp,
the token's logit by maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
