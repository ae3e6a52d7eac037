"""Tables of trained heads, steps and the trainer, from their files; `python -m benchmarks.numbers` writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serve_tables import content, table

Row = Mapping[str, Any]
TEXTS = {"own_t1": "own, T=1", "own_t0": "own, T=0", "unseen_t1": "Spec-Bench, T=1", "unseen_t0": "Spec-Bench, T=0"}


def cell(row: Row, digits: int = 2) -> str:
    """Return tokens/step ± standard error."""
    return f"{row['tokens_per_step']:.{digits}f} ± {row['standard_error']:.{digits}f}"


def millions(parameters: int) -> str:
    return f"{parameters / 1e6:.2f}M"


def error_of(shares: NDArray[np.float64]) -> float:
    return shares.std(ddof=1) * math.sqrt(len(shares))


def by_head(*names: str, also: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Return the rows of trunks, circuits and leaves by head, one for each seed; seeds of `also` too."""
    found: dict[tuple[str, int], Row] = {}
    for row in [row for name in (*names, *also) for row in content(name)["rows"]]:
        found.setdefault((row["name"], row["seed"]), row)
    heads = dict.fromkeys(row["name"] for name in names for row in content(name)["rows"])
    return {head: [row for (name, _), row in found.items() if name == head] for head in heads}


def parts(*names: str, also: Sequence[str] = ()) -> str:
    """Return a table of trunks, circuits and leaves on a real vocabulary: means over the seeds."""
    lines = []
    for head, rows in by_head(*names, also=also).items():
        shown = [over_seeds([row[text] for row in rows]) for text in TEXTS]
        minutes = np.mean([row["seconds"] for row in rows]) / 60
        lines.append([head, str(len(rows)), millions(rows[0]["parameters"]), *shown, f"{minutes:.1f}"])
    return table("trunk, circuit, leaves|seeds", lines, ["parameters", *TEXTS.values(), "minutes"])


def tasks(name: str) -> str:
    """Return tokens/step on Spec-Bench by task, and the share of the target's tokens that can be drafted."""
    rows, lines = content(name)["rows"], []
    columns = sorted(rows[0]["unseen_t1"]["tasks"])
    for t in (1, 0):
        for row in rows:
            found = (row[f"unseen_t{t}"]["tasks"][task] for task in columns)
            shown = (f"{one['tokens_per_step']:.2f} ± {one['standard_error']:.2f}" for one in found)
            lines.append([f"{row['name']}, T={t}", *shown])
        shares = (rows[0][f"unseen_t{t}"]["tasks"][task]["coverage"] for task in columns)
        lines.append([f"can be drafted, T={t}", *(f"{share:.1%}" for share in shares)])
    return table("head", lines, columns)


def lost() -> str:
    """Return steps and accepted first drafts by the entropy of the target, a row for each temperature."""
    rows = content("smollm2-lost")["rows"]
    least = sorted({row["bits"] for row in rows})
    columns = [*(f"{a:g} to {b:g} bits" for a, b in pairwise(least)), f"{least[-1]:g} and more"]
    lines = []
    for t in (1, 0):
        own = [row for row in rows if row["temperature"] == t]
        lines.append([f"steps, T={t}", *(f"{row['share']:.0%}" for row in own)])
        accepted = (f"{row['accepted']:.2f} ± {row['standard_error']:.2f}" for row in own)
        lines.append([f"first draft accepted, T={t}", *accepted])
        lines.append([f"can be drafted, T={t}", *(f"{row['coverage']:.1%}" for row in own)])
    return table("entropy of the target", lines, columns)


def over_seeds(results: Sequence[Row]) -> str:
    """Return tokens/step and the gain ± its error."""
    mean = np.mean([row["tokens_per_step"] for row in results])
    gain, error = gain_over_seeds(results)
    return f"{mean:.3f} ({gain:+.3f} ± {error:.3f})" if error else f"{mean:.3f}"


def gain_over_seeds(results: Sequence[Row]) -> tuple[float, float]:
    """Return the mean gain and its error: of the texts, which are the same for all seeds, and of the seeds."""
    gains, errors = (np.array([row["gain"][part] for row in results]) for part in (0, 1))
    of_seeds = gains.var(ddof=1) / len(gains) if len(gains) > 1 else 0.0
    return float(gains.mean()), math.sqrt(np.mean(errors**2) + of_seeds)


def steps(name: str) -> str:
    """Return milliseconds of plain vLLM's step, and of heads the ratio to it with its quartiles, and of the draft."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in content(name)["rows"]:
        low, middle, high = row["ratio"]
        draft = f"; {row['draft_ms']:.1f} ms" if row["drafts"] else ""
        line = lines.setdefault((row["head"], str(row["drafts"])), {})
        is_plain = row["head"] == "plain"
        shown = f"{row['step_ms']:.0f} ms" if is_plain else f"{middle:.2f}x [{low:.2f}, {high:.2f}]{draft}"
        line[f"c={row['clients']}"] = shown
        line["greedy, equal to plain's"] = f"{row['identical']} of {row['answers']}"
    columns = dict.fromkeys(column for line in lines.values() for column in sorted(line, key=lambda c: c[0] == "g"))
    return table("head|K", [[*key, *map(line.get, columns)] for key, line in lines.items()], list(columns))


BLOCKS: dict[str, Callable[[], str]] = {
    "parts": partial(parts, "smollm2-grid", also=("smollm2-seeds",)),
    "parts factors": partial(parts, "smollm2-factors", also=("smollm2-seeds",)),
    "parts more": partial(parts, "smollm2-more-steps"),
    "parts head": partial(parts, "smollm2-first", "smollm2-head"),
    "parts frozen": partial(parts, "smollm2-frozen"),
    "tasks": partial(tasks, "smollm2-head"),
    "lost": lost,
    "milliseconds": partial(steps, "smollm2-step"),
}
