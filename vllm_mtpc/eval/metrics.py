"""Metrics of a head's drafts, and their formatting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_mtpc.errors import UsageError

if TYPE_CHECKING:
    from typing import Self

    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Tokens/step of a head at one temperature. s.e.: standard error over sequences."""

    tokens_per_step: float  # the target's own token included; plain decoding is 1.0
    standard_error: float
    per_position: list[float]  # unconditional: P(drafts 1..k are all accepted), k = 1..K, over steps
    sequences: int
    steps: float  # counted or expected number

    @classmethod
    def of(cls, steps: Tensor, tokens: Tensor, accepted: Tensor, **more: Any) -> Self:
        """Compute metrics from steps[S] and tokens[S] of texts, and accepted[K + 1], the steps by accepted drafts."""
        value, error = ratio(tokens, steps)
        at_least = accepted.double().flip(0).cumsum(0).flip(0)
        per_position, total = (at_least[1:] / at_least[0]).tolist(), steps.sum().item()
        found = {"tokens_per_step": value, "standard_error": error, "per_position": per_position}
        return cls(**found, sequences=len(steps), steps=total, **more)


@dataclass(frozen=True, kw_only=True)
class Metrics(StepMetrics):
    """Metrics of a circuit head."""

    anywhere: float  # expected tokens of a step started at a uniformly chosen position
    contexts: int
    target_bits: float  # per token of the text, under the target at temperature 1
    joint_bits: float  # per token, under the circuit's joint over the window
    bytes_per_token: float | None = None  # of the text; None where its tokenizer is not known


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


def shown_tokens(metrics: Any) -> str:
    """Format tokens/step with its standard error."""
    return f"{metrics.tokens_per_step:.3f} ± {metrics.standard_error:.3f}"


def shown_shares(values: Sequence[float]) -> str:
    """Format probabilities as one cell of a table: .93 .81 .60"""
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)
