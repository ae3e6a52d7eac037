"""Time default serving against plain vLLM, and summarise the rows that `doctor` kept in a head's folder."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from vllm_mtpc.checkpoint.locate import SERVED_FILE
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.passes import Measured, Prompt, Setting, launched
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import read_json

CLIENTS = (1, 4, 16)
SLOWER = 0.97  # of plain vLLM: noise of a machine is below it
MAX_TOKENS, ROUNDS = 64, 3  # tokens of an answer; rounds of passes
SECONDS = 90.0  # no pass starts after this time
Row = dict[str, Any]


def measure(
    engine: dict[str, Any],
    speculative: dict[str, Any],
    prompts: Sequence[Prompt],
    settings: Sequence[tuple[float, int]],
    max_tokens: int,
    together: bool,
    logs: Path,
) -> list[Row]:
    """Measure paired passes of two engines, without and with drafts.

    Args:
        engine: keyword arguments of `vllm.LLM`; `speculative`: its speculative_config of the engine that drafts.
        settings: (temperature, clients) of each cell; cells that SECONDS leave no time for are left out.
        together: whether both engines are alive at once and take turns; else plain vLLM runs first.

    Returns:
        A row for each cell: temperature, clients, speedup (median of the rounds), speedups, tokens_per_step,
        tokens_per_second.

    Raises:
        EngineFailed: an engine does not start or answer.
    """
    engine = {**engine, "enable_prefix_caching": False}
    engines = [("plain", engine), ("default", {**engine, "speculative_config": speculative})]
    cells = [Setting(f"{T:g} {c}", c, T, min(max_tokens, MAX_TOKENS), max(4, 2 * c)) for T, c in settings]
    passes = [replace(cell, first=turn * cell.prompts) for turn in range(ROUNDS) for cell in cells]
    found: dict[str, list[Measured]] = {"plain": [], "default": []}
    for group in [engines] if together else [[one] for one in engines]:
        with ExitStack() as stack:
            alive = [(name, stack.enter_context(launched(of, prompts, logs / f"{name}.log"))) for name, of in group]
            deadline = time.monotonic() + SECONDS * len(group) / len(engines)
            for turn, one in enumerate(passes):
                for name, child in alive[:: -1 if turn // len(cells) % 2 else 1]:
                    found[name].append(child.measure(one))
                if time.monotonic() > deadline:
                    break
    pairs = list(zip(found["plain"], found["default"], strict=False))
    return [_row(cell, pairs[turn :: len(cells)]) for turn, cell in enumerate(cells) if turn < len(pairs)]


def _row(cell: Setting, pairs: Sequence[tuple[Measured, Measured]]) -> Row:
    speedups = [round(drafted.tokens_per_second / plain.tokens_per_second, 4) for plain, drafted in pairs]
    return {
        "temperature": cell.temperature,
        "clients": cell.clients,
        "speedup": round(median(speedups), 4),
        "speedups": speedups,
        "tokens_per_step": round(fmean(drafted.tokens_per_step for _, drafted in pairs), 3),
        "tokens_per_second": round(median(drafted.tokens_per_second for _, drafted in pairs), 2),
    }


def read_served(folder: Path) -> dict[str, Any] | None:
    """Read the rows of `measure` and the hardware from a head's folder; None where they cannot be read."""
    try:
        record = read_json(folder / SERVED_FILE)
        rows = [{key: float(row[key]) for key in ("temperature", "clients", "speedup")} for row in record["rows"]]
        if not rows or not all(map(math.isfinite, (value for row in rows for value in row.values()))):
            return None
        return {**record, "rows": rows}
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None


def rows_here(folder: Path) -> list[Row]:
    """Return the rows in a head's folder if they were measured on this machine."""
    record = read_served(folder)
    return record["rows"] if record and record.get("hardware") == provenance.hardware() else []


def is_slower(rows: Sequence[Row]) -> bool:
    """Return whether plain vLLM is faster in one of the cells."""
    return any(row["speedup"] < SLOWER for row in rows)


def verdict(rows: Sequence[Row]) -> str:
    """Return the recommended numbers of clients, by the slowest temperature of each."""
    worst = {c: min(row["speedup"] for row in rows if row["clients"] == c) for c in {row["clients"] for row in rows}}
    losing, paying = ([f"{c:g}" for c in sorted(worst) if (worst[c] < SLOWER) is slow] for slow in (True, False))
    if not paying:
        return "do not serve it here"
    if not losing:
        gains = max(row["speedup"] for row in rows) * SLOWER > 1
        return f"{'serve it here' if gains else 'no gain here'}: measured at {', '.join(paying)} clients"
    is_beyond = float(losing[0]) > float(paying[-1])
    return f"do not serve at {f'more than {paying[-1]}' if is_beyond else ', '.join(losing)} clients here"


def worth(expected: Mapping[str, float], folder: Path) -> str:
    """Summarise in a line: tokens/step `expected` by temperature ("T=1"), measured speed-ups, a verdict."""
    totals = ", ".join(f"{value:.2f} at {name}" for name, value in expected.items())
    parts = [f"expected with all drafts: {totals} tokens/step" if totals else "tokens/step: not measured"]
    record, hint = read_served(folder), f"type: vllm-mtpc doctor {folder}"
    if record is None:
        return "; ".join([*parts, f"served by default compared with plain vLLM: not measured on this machine, {hint}"])
    rows, is_here = record["rows"], bool(rows_here(folder))
    parts.append(f"served by default on {'this' if is_here else 'another'} machine compared with plain vLLM")
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        mine = [f"{row['speedup']:.2f}x at {row['clients']:g}" for row in rows if row["temperature"] == temperature]
        parts.append(f"T={temperature:g}: {', '.join(mine)} clients")
    return "; ".join([*parts, verdict(rows) if is_here else f"not measured on this machine, {hint}"])
