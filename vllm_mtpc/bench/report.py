"""Rows and tables of `vllm-mtpc bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
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
    passes: dict[tuple[Any, ...], list[Pass]] = {}
    for one in sorted(comparison.passes, key=lambda one: (-one.load.temperature, one.load.clients)):
        passes.setdefault((one.load, one.decoding.name), []).append(one)
    return [_row(found, comparison) for found in passes.values()]


def _row(found: list[Pass], comparison: Comparison) -> Row:
    decoding, load = found[0].decoding, found[0].load
    results = [one.result for one in found]
    rates = [one.tokens_per_second for one in results]
    speedups = [one.speedup for one in found]
    accepted = sum((one.acceptance for one in results), Acceptance())
    return {
        "decoding": decoding.name,
        "ours": decoding.is_ours,
        "setting": load.name,
        "temperature": load.temperature,
        "clients": load.clients,
        "prompts": load.prompts,
        "max_tokens": load.max_tokens,
        "rounds": len(found),
        "tokens_per_second": round(median(rates), 2),
        "tokens_per_second_spread": [round(min(rates), 2), round(max(rates), 2)],
        "speedup": None if decoding.is_plain else round(median(speedups), 4),
        "speedup_spread": None if decoding.is_plain else [round(min(speedups), 4), round(max(speedups), 4)],
        "tokens_per_step": round(accepted.tokens_per_step, 4),
        "acceptance_per_position": [round(rate, 4) for rate in accepted.per_position],
        "identical": comparison.identical(decoding) if load.temperature == 0 else None,
        "ttft_ms": round(median(one.ttft_ms for one in results), 3),
        "tpot_ms": round(median(one.tpot_ms for one in results), 3),
        "speedups": [round(value, 4) for value in speedups],
        "tokens": [one.tokens for one in results],
        "seconds": [round(one.seconds, 4) for one in results],
        "cpu_seconds": [round(one.cpu_seconds, 3) for one in results],
    }


def make_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Return the header and lines of a table; - where there is no value."""
    names = "T, c|decoding|tok/s|speed-up|least..most|tokens/step|acceptance|TTFT ms|TPOT ms|identical"
    lines = []
    for row in rows:
        speedup, spread, same = row["speedup"], row["speedup_spread"], row["identical"]
        line = [row["setting"], row["decoding"], f"{row['tokens_per_second']:.1f}"]
        line += [f"{speedup:.2f}x", f"{spread[0]:.2f}..{spread[1]:.2f}"] if speedup else ["-", "-"]
        line += [f"{row['tokens_per_step']:.2f}"]
        line += [" ".join(f"{rate:.2f}" for rate in row["acceptance_per_position"]) or "-"]
        line += [f"{row['ttft_ms']:.1f}", f"{row['tpot_ms']:.2f}", f"{same[0]} of {same[1]}" if same else "-"]
        lines.append(line)
    return names.split("|"), lines
