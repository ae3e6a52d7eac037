"""What is found of a head's drafts, and how it is shown."""

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
    """What one head's drafts gain at one temperature. s.e.: standard error over sequences."""

    tokens_per_step: float  # the target's own token included; plain decoding is 1.0
    standard_error: float
    per_position: list[float]  # unconditional: P(drafts 1..k are all accepted), k = 1..K, over steps
    sequences: int
    steps: float  # number of them, or what is expected of it

    @classmethod
    def of(cls, steps: Tensor, tokens: Tensor, accepted: Tensor, **more: Any) -> Self:
        """From steps[S] and tokens[S] of texts, and accepted[K + 1]: steps by accepted drafts."""
        value, error = ratio(tokens, steps)
        at_least = accepted.double().flip(0).cumsum(0).flip(0)
        per_position, total = (at_least[1:] / at_least[0]).tolist(), steps.sum().item()
        found = {"tokens_per_step": value, "standard_error": error, "per_position": per_position}
        return cls(**found, sequences=len(steps), steps=total, **more)


@dataclass(frozen=True, kw_only=True)
class Metrics(StepMetrics):
    """Of a head whatever its family."""

    anywhere: float  # expected tokens of a step started at a uniformly chosen position
    contexts: int
    target_bits: float | None = None  # per token of the text, under the target at temperature 1
    joint_bits: float | None = None  # per token, under the circuit's joint over the window
    bytes_per_token: float | None = None  # of the text; None where its tokenizer is not known

    def per_byte(self, bits_per_token: float | None) -> float | None:
        """Bits per UTF-8 byte of bits per token; None where either is not known."""
        if bits_per_token is None or not self.bytes_per_token:
            return None
        return bits_per_token / self.bytes_per_token


def check_drafts(window: int, num_drafts: int | None, default: int) -> int:
    """K: as given, or ``default``. Raises UsageError where a window has not so many drafts."""
    if num_drafts is None:
        return default
    if not 1 <= num_drafts <= window - 1:
        raise UsageError(
            f"num_drafts={num_drafts}: the head's window is {window} and its first token is the target's own; "
            f"allowed are 1 to {window - 1}"
        )
    return num_drafts


def ratio(numerator: Tensor, denominator: Tensor) -> tuple[float, float]:
    """Ratio of sums over independent sequences [S] and its standard error (linearised; nan for one sequence)."""
    value = (numerator.sum() / denominator.sum()).item()
    residual = numerator - value * denominator
    spread = residual.std().item() if len(residual) > 1 else math.nan
    return value, spread * math.sqrt(len(residual)) / denominator.sum().item()


def shown_tokens(metrics: Any) -> str:
    """Tokens/step with its standard error, of any metrics; of none a dash."""
    return "-" if metrics is None else shown(metrics.tokens_per_step, metrics.standard_error)


def shown(value: float | None, error: float | None = None) -> str:
    """A number of a table, with its standard error where it has one."""
    if value is None:
        return "-"
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def shown_shares(values: Sequence[float]) -> str:
    """Probabilities in one cell of a table: .93 .81 .60"""
    return " ".join(f"{value:.2f}".removeprefix("0") for value in values)
