"""The passes of `vllm-mtpc bench serve` as rows, one per way of decoding and setting, and as tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from statistics import median
from typing import Any

from vllm_mtpc.bench.decodings import OWN
from vllm_mtpc.bench.rounds import Pass
from vllm_mtpc.engine.counters import DEFINITIONS, Acceptance
from vllm_mtpc.engine.steps import DEFINITIONS as STEP_DEFINITIONS
from vllm_mtpc.eval.speed import SLOWER

STEP_PARTS = ("step_ms", "target_ms", "draft_ms", "draft_share")
Row = dict[str, Any]
MORE = (
    "with drafts: share of a request's decoding steps that carried drafts; the schedule by batch size may give none, "
    "or fewer than the head can: positions left out count as not accepted.",
    "identical: greedy answers that equal plain's of the same setting token for token, over all rounds.",
    "TTFT: until the first token of a request; TPOT: each later token; medians over requests.",
    "wall s, CPU s: of a pass, and of the engine's processes in it; medians over rounds.",
    "GPU MiB added: what an engine has less of for its KV cache than plain: the head, its buffers and graphs, and what "
    "a step with drafts needs besides.",
)


def definitions(over_http: bool) -> list[str]:
    """What the columns of a table mean."""
    return [*DEFINITIONS.splitlines(), *([] if over_http else STEP_DEFINITIONS.splitlines()), *MORE]


def rows(passes: Sequence[Pass]) -> list[Row]:
    """One row per way of decoding and setting, in the order of the settings; results are medians over rounds."""
    cells: dict[tuple[Any, ...], list[Pass]] = {}
    for one in sorted(passes, key=lambda one: (one.decoding.group != OWN, -one.cell.temperature, one.cell.clients)):
        cells.setdefault((one.decoding.group, one.cell, one.decoding.name), []).append(one)
    plain = {one.decoding.group: one.kv_cache_bytes for one in passes if one.decoding.is_plain}
    return [_row(found, plain.get(found[0].decoding.group)) for found in cells.values()]


def _row(found: list[Pass], plain_bytes: int | None) -> Row:
    decoding, cell = found[0].decoding, found[0].cell
    measured = [one.measured for one in found]
    rates = [one.tokens_per_second for one in measured]
    speedups = [one.speedup for one in found]
    own_bytes = found[0].kv_cache_bytes
    added = None
    if own_bytes is not None and plain_bytes is not None and not decoding.is_plain:
        added = round((plain_bytes - own_bytes) / 2**20, 1)
    accepted = reduce(add, (one.acceptance for one in measured), Acceptance())
    return {
        "decoding": decoding.name,
        "circuit": decoding.circuit,
        "ours": decoding.is_ours,
        "group": decoding.group,
        "runner": found[0].runner,
        "temperature": cell.temperature,
        "clients": cell.clients,
        "prompts": cell.prompts,
        "max_tokens": cell.max_tokens,
        "rounds": len(found),
        "tokens_per_second": round(median(rates), 2),
        "tokens_per_second_spread": [round(min(rates), 2), round(max(rates), 2)],
        "speedup": None if decoding.is_plain else round(median(speedups), 4),
        "speedup_spread": None if decoding.is_plain else [round(min(speedups), 4), round(max(speedups), 4)],
        **_steps(found, accepted),
        "acceptance_per_position": [round(rate, 4) for rate in accepted.per_position],
        "identical": _identical(found),
        "ttft_ms": round(1000 * median(one.first_token_seconds for one in measured), 3),
        "tpot_ms": round(1000 * median(one.token_seconds for one in measured), 3),
        "gpu_mib_added": added,
        "speedups": [round(value, 4) for value in speedups],
        "seconds": [round(one.seconds, 4) for one in measured],
        "cpu_seconds": [round(one.cpu_seconds, 3) for one in measured],
        "tokens": [one.tokens for one in measured],
    }


def _steps(found: list[Pass], accepted: Acceptance) -> Row:
    """Tokens/step over all rounds, and the parts of a step where the engine's steps were timed."""
    steps = [one.measured.steps for one in found if one.measured.steps is not None]
    if len(steps) < len(found):
        unknown = dict.fromkeys(("drafted_share", "rows_per_step", *STEP_PARTS))
        return {"tokens_per_step": round(accepted.tokens_per_step, 4), **unknown}
    requests = sum(one.request_steps for one in steps)
    times = {name: median(getattr(one, name) for one in steps) for name in ("step_ms", "target_ms", "draft_ms")}
    return {
        "tokens_per_step": round(1 + accepted.accepted_tokens / requests, 4),
        "drafted_share": round(min(1.0, accepted.drafts / requests), 4),
        "rows_per_step": round(sum(one.rows for one in steps) / requests, 3),
        **{name: round(value, 4) for name, value in times.items()},
        "draft_share": round(times["draft_ms"] / times["step_ms"], 4),
    }


def _identical(found: list[Pass]) -> list[int] | None:
    """Greedy answers that equal plain's, and how many there are; None for plain and for sampled passes."""
    pairs = [(one.measured, one.plain) for one in found if one.plain is not None and one.cell.greedy]
    if not pairs:
        return None
    return [sum(mine.identical(plain) for mine, plain in pairs), sum(len(plain.outputs) for _, plain in pairs)]


def differing(found: Sequence[Row]) -> list[Row]:
    """Rows whose greedy output is not plain's."""
    return [row for row in found if row["identical"] and row["identical"][0] < row["identical"][1]]


def losing(found: Sequence[Row]) -> list[Row]:
    """Rows of this package's heads that are slower than plain by more than noise."""
    return [row for row in found if row["ours"] and row["speedup"] is not None and row["speedup"] < SLOWER]


def unsteady(found: Sequence[Row]) -> list[Row]:
    """Rows whose fastest round is more than twice as fast as the slowest: something else ran on the machine."""
    return [row for row in found if row["tokens_per_second_spread"][1] > 2 * row["tokens_per_second_spread"][0]]


def place(row: Row) -> str:
    """Which row it is, in words."""
    return f"{row['decoding']} T={row['temperature']:g} c={row['clients']}"


def overview(found: Sequence[Row], group: str) -> tuple[list[str], list[list[str]]]:
    """Header and lines: a way of decoding each, tok/s and speed-up for every setting of a group."""
    mine = [row for row in found if row["group"] == group]
    settings = list(dict.fromkeys((row["temperature"], row["clients"]) for row in mine))
    lines = []
    for name in dict.fromkeys(row["decoding"] for row in mine):
        by_setting = {(row["temperature"], row["clients"]): row for row in mine if row["decoding"] == name}
        lines.append([name, *(_cell(by_setting.get(setting)) for setting in settings)])
    return ["tok/s (speed-up)", *(f"T={T:g}, c={clients}" for T, clients in settings)], lines


def _cell(row: Row | None) -> str:
    if row is None:
        return "not run"
    rate = f"{row['tokens_per_second']:.0f}"
    return rate if row["speedup"] is None else f"{rate} ({row['speedup']:.2f}x)"


COLUMNS = (
    ("T, c", lambda row: f"T={row['temperature']:g}, c={row['clients']}"),
    ("decoding", lambda row: row["decoding"] + ("" if row["group"] == OWN else f" [{row['group']}]")),
    ("tok/s", "tokens_per_second", "{:.1f}"),
    ("speed-up", "speedup", "{:.2f}x"),
    ("least..most", "speedup_spread", "{0[0]:.2f}..{0[1]:.2f}"),
    ("tokens/step", "tokens_per_step", "{:.2f}"),
    ("with drafts", "drafted_share", "{:.0%}"),
    ("acceptance", lambda row: " ".join(f"{rate:.2f}" for rate in row["acceptance_per_position"]) or None),
    ("step ms", "step_ms", "{:.2f}"),
    ("target ms", "target_ms", "{:.2f}"),
    ("draft ms", "draft_ms", "{:.2f}"),
    ("draft share", "draft_share", "{:.1%}"),
    ("wall s", lambda row: f"{median(row['seconds']):.2f}"),
    ("CPU s", lambda row: f"{median(row['cpu_seconds']):.2f}"),
    ("TTFT ms", "ttft_ms", "{:.1f}"),
    ("TPOT ms", "tpot_ms", "{:.2f}"),
    ("GPU MiB added", "gpu_mib_added", "{:.0f}"),
    ("identical", "identical", "{0[0]} of {0[1]}"),
)


def details(found: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: everything about every row; parts of a step where one was timed; None is shown as -."""
    is_timed = any(row["step_ms"] is not None for row in found)
    columns = [column for column in COLUMNS if is_timed or column[1] not in STEP_PARTS]

    def cell(row: Row, shown: str | Callable[[Row], Any], form: str = "{}") -> str:
        value = shown(row) if callable(shown) else row[shown]
        return "-" if value is None else form.format(value)

    return [name for name, *_ in columns], [[cell(row, *column[1:]) for column in columns] for row in found]
