"""What is found of a head's drafts, and how it is shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from vllm_mtpc.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Metrics:
    """What one head does at one temperature. s.e.: standard error over sequences."""

    tokens_per_step: float  # the target's own token included; plain decoding is 1.0
    standard_error: float
    per_position: list[float]  # unconditional: P(drafts 1..k are all accepted), k = 1..K, over steps
    anywhere: float  # expected tokens of a step started at a uniformly chosen position
    sequences: int
    contexts: int
    steps: float = 0.0  # expected number of steps
    target_bits: float | None = None  # per token of the text, under the target at temperature 1
    joint_bits: float | None = None  # per token, under the circuit's joint over the window
    bytes_per_token: float | None = None  # of the text; None where its tokenizer is not known

    def as_dict(self) -> dict[str, object]:
        """For provenance files."""
        return asdict(self)

    def per_byte(self, bits_per_token: float | None) -> float | None:
        """Bits per UTF-8 byte of bits per token; None where either is not known."""
        if bits_per_token is None or not self.bytes_per_token:
            return None
        return bits_per_token / self.bytes_per_token


def check_drafts(window: int, num_drafts: int) -> int:
    """K, if a window has so many drafts. Raises UsageError otherwise."""
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


def reached(histogram: Tensor) -> list[float]:
    """P(drafts 1..k are all accepted), k = 1..K, from histogram[K + 1]: steps by accepted drafts."""
    at_least = histogram.double().flip(0).cumsum(0).flip(0)
    return (at_least[1:] / at_least[0]).tolist()


def table(columns: Sequence[tuple[str, Callable[[Any], str]]], results: Sequence[Any]) -> list[tuple[str, list[str]]]:
    """Names and cells of the rows of a table that has a column for each result."""
    return [(name, [show(result) for result in results]) for name, show in columns]


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
