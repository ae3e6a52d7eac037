"""Rows and tables of `vllm-mtpc bench serve`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from vllm_mtpc.bench.comparison import Comparison, Pass
from vllm_mtpc.engine.counters import DEFINITIONS, Acceptance

Row = dict[str, Any]
COLUMN_DEFINITIONS = (
    *DEFINITIONS.splitlines(),
    "identical: greedy answers that equal plain vLLM's token for token, of a check apart from the passes.",
    "TTFT: time to the first token of a request; TPOT: time per later token; medians over requests.",
    "seconds, cpu_seconds: of each pass, by the clock and of the server's processes.",
)


def make_rows(comparison: Comparison) -> list[Row]:
    """Return one row per setting and way of decoding; results are medians over rounds."""
    cells: dict[tuple[Any, ...], list[Pass]] = {}
    for one in sorted(comparison.passes, key=lambda one: (-one.cell.temperature, one.cell.clients)):
        cells.setdefault((one.cell, one.decoding.name), []).append(one)
    return [_row(found, comparison) for found in cells.values()]


def _row(found: list[Pass], comparison: Comparison) -> Row:
    decoding, cell = found[0].decoding, found[0].cell
    measured = [one.measured for one in found]
    rates = [one.tokens_per_second for one in measured]
    speedups = [one.speedup for one in found]
    accepted = sum((one.acceptance for one in measured), Acceptance())
    return {
        "decoding": decoding.name,
        "ours": decoding.is_ours,
        "setting": cell.name,
        "temperature": cell.temperature,
        "clients": cell.clients,
        "prompts": cell.prompts,
        "max_tokens": cell.max_tokens,
        "rounds": len(found),
        "tokens_per_second": round(median(rates), 2),
        "tokens_per_second_spread": [round(min(rates), 2), round(max(rates), 2)],
        "speedup": None if decoding.is_plain else round(median(speedups), 4),
        "speedup_spread": None if decoding.is_plain else [round(min(speedups), 4), round(max(speedups), 4)],
        "tokens_per_step": round(accepted.tokens_per_step, 4),
        "acceptance_per_position": [round(rate, 4) for rate in accepted.per_position],
        "identical": comparison.identical(decoding) if cell.temperature == 0 else None,
        "ttft_ms": round(median(one.ttft_ms for one in measured), 3),
        "tpot_ms": round(median(one.tpot_ms for one in measured), 3),
        "speedups": [round(value, 4) for value in speedups],
        "tokens": [one.tokens for one in measured],
        "seconds": [round(one.seconds, 4) for one in measured],
        "cpu_seconds": [round(one.cpu_seconds, 3) for one in measured],
    }


def overview(found: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the header and lines of a table: tok/s and speed-up by way of decoding and setting."""
    settings = list(dict.fromkeys(row["setting"] for row in found))
    rows = {(row["decoding"], row["setting"]): row for row in found}
    names = dict.fromkeys(row["decoding"] for row in found)
    lines = [[name, *(_cell(rows.get((name, setting))) for setting in settings)] for name in names]
    return ["tok/s (speed-up)", *settings], lines


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    rate = f"{row['tokens_per_second']:.0f}"
    return rate if row["speedup"] is None else f"{rate} ({row['speedup']:.2f}x)"


COLUMNS = (
    ("T, c", "setting"),
    ("decoding", "decoding"),
    ("tok/s", "tokens_per_second", "{:.1f}"),
    ("speed-up", "speedup", "{:.2f}x"),
    ("least..most", "speedup_spread", "{0[0]:.2f}..{0[1]:.2f}"),
    ("tokens/step", "tokens_per_step", "{:.2f}"),
    ("acceptance", lambda row: " ".join(f"{rate:.2f}" for rate in row["acceptance_per_position"]) or None),
    ("TTFT ms", "ttft_ms", "{:.1f}"),
    ("TPOT ms", "tpot_ms", "{:.2f}"),
    ("identical", "identical", "{0[0]} of {0[1]}"),
)


def details(found: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the header and lines of a table of all columns; None is shown as -."""

    def cell(row: Row, shown: str | Callable[[Row], Any], form: str = "{}") -> str:
        value = shown(row) if callable(shown) else row[shown]
        return "-" if value is None else form.format(value)

    return [name for name, *_ in COLUMNS], [[cell(row, *column[1:]) for column in COLUMNS] for row in found]
