"""Tables of benchmarks/RESULTS.md, from their files; `python -m benchmarks.numbers` writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks import hosted, served_states
from benchmarks.serve_tables import content, read, table

Row = Mapping[str, Any]


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
    """Return the tables of heads trained on states of vLLM."""
    return served_states.table(content("served-states") | {"served": content("served-int8")["served"]})


def native() -> str:
    """Return the table of heads on a native MTP layer."""
    return hosted.table(content("hosted"))


def soaks() -> str:
    """Return what the soaks answered."""
    shown = {"v1-swap": "V1, btree and hmm in turns", "v2-swap": "V2, the same", "v2-ptp": "V2, `late` (PTP)"}
    lines = []
    for name, head in shown.items():
        one = content(f"soak-{name}")
        requests = sum(count for kind, count in one["requests"].items() if kind != "swap")
        counts = [requests, one["greedy_equal_to_plain"], one["preemptions"], len(one["faults"])]
        lines.append([head, *(f"{count:,}" for count in counts), f"{one['tokens_per_step']:.2f}"])
        lines[-1].append(f"{one['memory_growth']:.3f}")
    columns = ["requests", "greedy, equal to plain vLLM's", "preempted", "faults", "tokens/step", "memory"]
    return table("runner, head", lines, columns)


def long_texts() -> str:
    """Return tokens/step and times after long texts."""
    lines = [
        [
            f"{row['positions']:,}",
            f"{row['temperature']:g}",
            row["head"],
            f"{row['tokens_per_step']:.2f}",
            f"{row['step_ms']:.1f}",
            f"{row['draft_ms']:.2f}" if row["draft_ms"] else "",
            f"{row['equal_to_plain']} of {row['texts']}" if not row["temperature"] and row["draft_ms"] else "",
        ]
        for row in sorted(content("long-context-cpu")["rows"], key=lambda row: (row["positions"], row["temperature"]))
    ]
    return table("tokens before|T|drafts by", lines, ["tokens/step", "step ms", "draft ms", "greedy, equal to plain's"])


def backbone_circuits() -> str:
    """Return the table of circuits on a frozen backbone."""
    lines = []
    for row in content("backbone-circuits")["rows"]:
        both = [cell(row[t], 3) for t in ("t1", "t0")]
        rank = str(row["token_rank"] or "")
        lines.append([f"{row['circuit']} r={row['components']}", rank, millions(row["parameters"]), *both])
    return table("circuit|`token_rank`", lines, ["parameters trained", "T=1", "T=0"])


def backbone_drafts() -> str:
    """Return the milliseconds of drafts of backbones, of one request and of four."""
    heads: dict[str, list[str]] = {}
    for index, row in enumerate(content("draft-backbone-cpu")["rows"]):  # two batches of a head follow each other
        name = row["head"].replace(" linear", ", linear (packaged)")
        name += " `token_rank` 32" if index // 2 % 2 else ""
        heads.setdefault(name, []).append("{:.1f} ({:.1f} to {:.1f})".format(*row["draft_ms"]))
    return table("head", [[name, *ms] for name, ms in heads.items()], ["1 request, ms", "4 requests, ms"])


def served(name: str, decodings: Mapping[str, str]) -> str:
    """Return tokens/step and speed-ups of one client."""
    rows, lines = read(name), []
    for key, shown in decodings.items():
        both = [rows[key][temperature, 1] for temperature in (1.0, 0.0)]
        line = [f"{row['tokens_per_step']:.2f}, {row['speedup']:.2f}x" for row in both]
        lines.append([shown, *line, "{} of {}".format(*both[1]["identical"])])
    return table("tokens/step, speed-up", lines, ["T=1", "T=0", "greedy, equal to plain's"])


def tokens() -> str:
    """Return the gain of `token_rank`, T=1 / T=0."""
    rows: dict[tuple[str, int], dict[str, str]] = {}
    for row in [one for name in ("tokens-cpu", "tokens-r32-cpu") for one in content(name)["rows"]]:
        rank = row["name"].partition("-tokens")[2]
        rows.setdefault((row["circuit"], row["components"]), {})[rank] = " / ".join(cells(row))
    lines = [
        [circuit, str(count), *(row[rank] for rank in ("", "32", "64"))]
        for (circuit, count), row in sorted(rows.items(), key=lambda one: one[0][1])
    ]
    return table("circuit|r", lines, ["without", "`token_rank` 32", "`token_rank` 64"])


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
        rest = [shape["head"], millions(row["parameters"]), f"{shape['windows']:,}", f"{shape['chunk']:,}"]
        lines.append([shape["name"], *sizes, *rest, *gib, f"{row['window_tokens_per_second']:,.0f}"])
    columns = ["head", "parameters", "windows", "chunk", "peak GiB", "formula GiB", "window tokens/s"]
    return table("shape|V|D|n|r", lines, columns)


TOKENS = {"ngram": "ngram", "btree btree": "btree with `token_rank`", "btree btree-without": "btree without"}
BLOCKS: dict[str, Callable[[], str]] = {
    "states": states,
    "native": native,
    "soak": soaks,
    "long texts": long_texts,
    "backbone circuits": backbone_circuits,
    "backbone drafts": backbone_drafts,
    "tokens": tokens,
    "tokens served": partial(served, "serve-tokens-cpu", TOKENS),
    "shakespeare": shakespeare,
    "training cuda": partial(training, "training-cuda"),
    "training cpu": partial(training, "training-cpu"),
}
