"""Metrics of a head's drafts: the steps of a server along texts, and formatting.

Steps do not start everywhere equally often: an accepted draft is skipped over. The steps are followed through each text
(exactly, by the probability that a step starts at each position); tokens/step is the number of tokens divided by the
number of steps, as a server counts it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_mtpc.errors import UsageError

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Tokens/step of a head at one temperature. s.e.: standard error over sequences."""

    tokens_per_step: float  # the target's own token included; plain decoding is 1.0
    standard_error: float
    per_position: list[float]  # unconditional: P(drafts 1..k are all accepted), k = 1..K, over steps
    sequences: int
    steps: float  # counted or expected number

    @classmethod
    def of(cls, starts: Tensor, alive: Tensor, **more: Any) -> Self:
        """Compute metrics of texts.

        Args:
            starts: [S, T], P(a step starts at t).
            alive: [S, T, K], P(drafts 1..k of a step at t are accepted), also past the end of a text.
            more: fields of a subclass.
        """
        steps = starts.sum(1)  # [S]
        value, error = ratio((starts * (1 + alive.sum(-1))).sum(1), steps)
        total, per_position = steps.sum(), (starts[..., None] * alive).sum((0, 1))
        found = {"tokens_per_step": value, "standard_error": error, "per_position": (per_position / total).tolist()}
        return cls(**found, sequences=len(steps), steps=total.item(), **more)


def exact_counts(alive: Tensor) -> Tensor:
    """P(exactly k drafts are accepted) [S, T, K + 1], k = 0..K; alive[S, T, K]: P(the first k are)."""
    at_least = torch.nn.functional.pad(torch.nn.functional.pad(alive, (1, 0), value=1.0), (0, 1))
    return at_least[..., :-1] - at_least[..., 1:]


def step_starts(alive: Tensor, valid: Tensor) -> Tensor:
    """Return P(a step starts at each position) [S, T], the first one certain, 0 outside of valid[S, T].

    alive[S, T, K] = P(the first k drafts of a step at t are accepted).
    """
    sequences, length, drafts = alive.shape
    exactly = exact_counts(alive)  # the step advances by 1 + k
    starts = alive.new_zeros(sequences, length + drafts + 1)
    starts[:, 0] = 1
    for t in range(length):
        starts[:, t + 1 : t + drafts + 2] += starts[:, t : t + 1] * exactly[:, t]
    return starts[:, :length] * valid


def check_drafts(window: int, num_drafts: int | None, default: int) -> int:
    """Return the number of drafts K, by default ``default``. Raises UsageError outside 1 .. window - 1."""
    if num_drafts is None:
        return default
    if not 1 <= num_drafts <= window - 1:
        raise UsageError(
            f"num_drafts={num_drafts}: the head's window is {window} and its first token is the target's own; "
            f"allowed are 1 to {window - 1}"
        )
    return num_drafts


def ratio(numerator: Tensor, denominator: Tensor) -> tuple[float, float]:
    """Return the ratio of sums over independent sequences [S] and its standard error (linearised; nan for one)."""
    value = (numerator.sum() / denominator.sum()).item()
    residual = numerator - value * denominator
    spread = residual.std().item() if len(residual) > 1 else math.nan
    return value, spread * math.sqrt(len(residual)) / denominator.sum().item()


def shown_tokens(metrics: StepMetrics) -> str:
    """Format tokens/step with its standard error."""
    return f"{metrics.tokens_per_step:.3f} ± {metrics.standard_error:.3f}"


def shown_shares(values: Sequence[float]) -> str:
    """Format probabilities as one cell of a table: .93 .81 .60"""
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)
