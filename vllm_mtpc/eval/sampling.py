"""How next tokens are picked: the target's after temperature, top-k and top-p, a circuit's after temperature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_mtpc.errors import UsageError
from vllm_mtpc.heads.ptp.distribution import processed

GREEDY_BELOW = 1e-5  # vLLM's own threshold


@dataclass(frozen=True)
class Sampling:
    """Temperature (0: greedy), top-p (1: off) and top-k (0: off). Raises UsageError where a value is not allowed.

    ``greedy_drafts``: drafts are the likeliest tokens of the circuit whatever the temperature.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    greedy_drafts: bool = False
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature={self.temperature}: allowed are 0 (greedy) and above; set it to 1")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p={self.top_p}: allowed are values above 0 up to 1 (off); set it to 1")
        if self.top_k < 0:
            raise UsageError(f"top_k={self.top_k}: allowed are 0 (off) and above; set it to 0")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def log_probs(self, logits: Tensor) -> Tensor:
        """log p [..., V] float32 of logits[..., V]; -inf outside top-k and top-p. Greedy: the untempered one."""
        if self.greedy:
            return logits.float().log_softmax(-1)
        return processed(logits, self.temperature, self.top_k, self.top_p)

    def draft_log_probs(self, log_q: Tensor) -> Tensor:
        """log [..., V] of what a draft is drawn from: softmax(log_q / T), or all on one token for greedy drafts."""
        if self.greedy_drafts:
            return torch.full_like(log_q, -torch.inf).scatter(-1, log_q.argmax(-1, keepdim=True), 0.0)
        return (log_q if self.greedy or self.temperature == 1 else log_q / self.temperature).log_softmax(-1)

    def pick(self, log_probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """One token per row of log_probs[B, V], [B] int64: the likeliest one if greedy, a draw otherwise."""
        if self.greedy:
            return log_probs.argmax(-1)
        return torch.multinomial(log_probs.exp(), 1, generator=generator)[:, 0]
