"""Tables of benchmarks/RESULTS.md, from their files; `python -m benchmarks.numbers` writes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.serve_tables import content, table

Row = Mapping[str, Any]
HOSTED = ("head", "circuit", "components", "component_rank", "token_rank")  # a compared head on a native MTP layer


def cell(row: Row, digits: int = 2) -> str:
    """Return tokens/step ± standard error."""
    return f"{row['tokens_per_step']:.{digits}f} ± {row['standard_error']:.{digits}f}"


def cells(row: Row, digits: int = 3) -> list[str]:
    """Return tokens/step ± standard error at T=1 and T=0 of a row of a sweep."""
    names = ("tokens_per_step", "standard_error")
    return [cell({name: row[name][t] for name in names}, digits) for t in ("t1", "t0")]


def millions(parameters: int) -> str:
    return f"{parameters / 1e6:.2f}M"


def states() -> str:
    """Return states/s by source, and heads of quantised targets by the states of their training."""
    lines = []
    for name, rates in content("served-states")["throughput"].items():
        lines.append([name, f"{median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}"])
    speeds = table("states of", lines, ["tokens/s", "rounds"])
    lines = [
        [bits, name, *(cell(found[t], 3) for t in ("T=0", "T=1"))]
        for bits, by_name in content("served-states")["quantised"].items()
        for name, found in by_name.items()
    ]
    return speeds + "\n" + table("served target|states of training", lines, ["tokens/step T=0", "T=1"])


def native() -> str:
    """Return the heads on a native MTP layer, and the comparisons of the best with native recursion."""
    found: dict[tuple[Any, ...], list[Row]] = {}  # a row per seed
    for row in content("hosted")["rows"]:
        found.setdefault(tuple(row.get(key) for key in HOSTED), []).append(row)
    lines = []
    for key, rows in found.items():
        numbers = ["{:.3f} ± {:.3f}".format(*ratio_of(rows, t)[:2]) for t in ("t1", "t0")]
        seeds = sorted(row["t1"]["tokens_per_step"] for row in rows)
        spread = f"{seeds[0]:.3f} to {seeds[-1]:.3f}" if len(seeds) > 1 else ""
        sizes = ["" if value is None else str(value) for value in key]
        lines.append([*sizes, numbers[0], spread, numbers[1], f"{rows[0]['products'] / 1e6:.2f}M"])
    columns = ["tokens/step T=1", "seeds", "T=0", "products"]
    return table("head|circuit|r|`component_rank`|`token_rank`", lines, columns) + "\n" + compared(found)


def compared(found: Mapping[tuple[Any, ...], list[Row]]) -> str:
    """Return the best heads against native recursion, the Markov head, and for products their factors."""
    recursion, markov = ("native recursion", *4 * (None,)), ("hosted", "ff", 1, 0, 32)
    names = {recursion: "native recursion", markov: "the Markov head"}
    circuits = [key for key in found if key[1] not in (None, "ff")]
    half = [key for key in circuits if found[key][0]["products"] <= found[recursion][0]["products"] / 2]
    pairs = []
    for what, keys in (("best", circuits), ("best with half of native recursion's products", half)):
        best = max(keys, key=lambda key: ratio_of(found[key], "t1")[0])
        pairs += [(what + ": ", best, other, names[other]) for other in (recursion, markov)]
    pairs += [("", key, (*markov[:4], key[4]), "its factors alone") for key in circuits if key[0] == "product"]
    lines = []
    for what, key, other, name in pairs:
        (a, _, left), (b, _, right) = (ratio_of(found[one], "t1") for one in (key, other))
        noise = error_of(left - right)
        word = "within noise" if abs(a - b) < 2 * noise else "more" if a > b else "fewer"
        sizes = "{} {} (r={}, `component_rank` {}, `token_rank` {})".format(*key)
        share = found[key][0]["products"] / found[other][0]["products"]
        gain = f"{a / b - 1:+.1%} ± {noise / b:.1%} tokens/step ({word}), {share:.0%} of the products"
        lines.append(f"* {what}{sizes} against {name}: {gain}.")
    return "\n".join([*lines, ""])


def ratio_of(rows: list[Row], t: str) -> tuple[float, float, NDArray[np.float64]]:
    """Return tokens/step over the texts of all seeds, its standard error, and each text's share of the error."""
    tokens, steps = np.array([row[t]["texts"] for row in rows]).sum(0).T
    value = tokens.sum() / steps.sum()
    shares = (tokens - value * steps) / steps.sum()
    return value, error_of(shares), shares


def error_of(shares: NDArray[np.float64]) -> float:
    return shares.std(ddof=1) * math.sqrt(len(shares))


def backbone_circuits() -> str:
    """Return the table of circuits on a frozen backbone."""
    lines = []
    for row in content("backbone-circuits")["rows"]:
        both = [cell(row[t], 3) for t in ("t1", "t0")]
        rank = str(row["token_rank"] or "")
        lines.append([f"{row['circuit']} r={row['components']}", rank, millions(row["parameters"]), *both])
    return table("circuit|`token_rank`", lines, ["parameters trained", "T=1", "T=0"])


def parts(*names: str, also: Sequence[str] = ()) -> str:
    """Return a table of trunks, circuits and leaves on a real vocabulary: means over the seeds, those of `also` too."""
    texts = {"own_t1": "own, T=1", "own_t0": "own, T=0", "unseen_t1": "Spec-Bench, T=1", "unseen_t0": "Spec-Bench, T=0"}
    found: dict[tuple[str, int], Row] = {}
    for row in [row for name in (*names, *also) for row in content(name)["rows"]]:
        found.setdefault((row["name"], row["seed"]), row)
    lines = []
    for head in dict.fromkeys(row["name"] for name in names for row in content(name)["rows"]):
        rows = [row for (name, _), row in found.items() if name == head]
        shown = [over_seeds([row[text] for row in rows]) for text in texts]
        minutes = np.mean([row["seconds"] for row in rows]) / 60
        lines.append([head, str(len(rows)), millions(rows[0]["parameters"]), *shown, f"{minutes:.1f}"])
    return table("trunk, circuit, leaves|seeds", lines, ["parameters", *texts.values(), "minutes"])


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


def over_seeds(results: list[Row]) -> str:
    """Return tokens/step and the gain ± its error: of the texts, which are the same ones, and of the seeds."""
    gains, errors = (np.array([row["gain"][part] for row in results]) for part in (0, 1))
    of_seeds = gains.var(ddof=1) / len(gains) if len(gains) > 1 else 0.0
    mean, error = np.mean([row["tokens_per_step"] for row in results]), math.sqrt(np.mean(errors**2) + of_seeds)
    return f"{mean:.3f} ({gains.mean():+.3f} ± {error:.3f})" if error else f"{mean:.3f}"


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


def shakespeare() -> str:
    """Return the table of Tiny Shakespeare with the paper's loss and the default one."""
    lines = []
    for paper, default in zip(*(content(name)["rows"] for name in ("shakespeare-nll", "shakespeare")), strict=True):
        bits = f"{paper['bits_per_byte']['joint']:.3f}"
        lines.append([paper["circuit"], str(paper["components"]), bits, *cells(paper, 2), *cells(default, 2)])
    columns = ["bits per byte, joint (paper's loss)", "T=1, paper's loss", "T=0, paper's loss"]
    return table("circuit|r", lines, [*columns, "T=1, default loss", "T=0, default loss"])


def training(name: str) -> str:
    """Return speed and memory of optimiser steps."""
    lines = []
    for row in content(name)["rows"]:
        shape = row["shape"]
        sizes = [f"{shape[key]:,}" for key in ("vocab_size", "hidden_size", "window", "components")]
        gib = [f"{row[key] / 2**30:.2f}" for key in ("peak_bytes", "expected_bytes")]
        rest = [
            shape.get("leaves") or shape["head"],
            millions(row["parameters"]),
            f"{shape['windows']:,}",
            f"{shape['chunk']:,}",
        ]
        lines.append([shape["name"], *sizes, *rest, *gib, f"{row['window_tokens_per_second']:,.0f}"])
    columns = ["head", "parameters", "windows", "chunk", "peak GiB", "formula GiB", "window tokens/s"]
    return table("shape|V|D|n|r", lines, columns)


BLOCKS: dict[str, Callable[[], str]] = {
    "states": states,
    "native": native,
    "backbone circuits": backbone_circuits,
    "parts": partial(parts, "smollm2-grid", also=("smollm2-seeds",)),
    "parts factors": partial(parts, "smollm2-factors", also=("smollm2-seeds",)),
    "parts more": partial(parts, "smollm2-more-steps"),
    "parts head": partial(parts, "smollm2-first", "smollm2-head"),
    "parts frozen": partial(parts, "smollm2-frozen"),
    "tasks": partial(tasks, "smollm2-head"),
    "lost": lost,
    "parts rows": partial(parts, "smollm2-rows"),
    "parts longer": partial(parts, "smollm2-circuits"),
    "milliseconds": partial(steps, "smollm2-step"),
    "shakespeare": shakespeare,
    "training cuda": partial(training, "training-cuda"),
    "training cpu": partial(training, "training-cpu"),
}
