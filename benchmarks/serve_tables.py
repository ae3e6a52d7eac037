"""Tables of served speed, from the files of `bench serve`; `python -m benchmarks.numbers` writes them.

A speed-up is the median over rounds of the ratio to plain vLLM in the same round; the range of five rounds is a 94 %
interval of the median.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from benchmarks.demo import demo_heads
from vllm_mtpc.engine import provenance

CELLS = [(temperature, clients) for temperature in (1.0, 0.0) for clients in (1, 4, 16)]
COLUMNS = [f"T={temperature:g}, c={clients}" for temperature, clients in CELLS]

Rows = dict[str, dict[tuple[float, int], dict[str, Any]]]  # by decoding, then temperature and clients


@cache
def content(file: str) -> Any:
    """Return a result file, or the provenance of a packaged head (``head/btree``)."""
    kind, _, name = file.rpartition("/")
    path = demo_heads.path(name) / "provenance.json" if kind == "head" else provenance.RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


def read(name: str) -> Rows:
    """Return the rows of a result file by a short name of the decoding."""
    rows: Rows = {}
    for row in content(name)["rows"]:
        decoding = re.sub(r"^\w+-head \[\w+\](, )?", "", row["decoding"]) or "default"
        decoding = decoding.replace(" (Medusa-style)", "") + (", V2 interpreted" if row.get("runner") == "V2" else "")
        rows.setdefault(decoding, {})[row["temperature"], row["clients"]] = row
    return rows


def table(head: str, lines: list[list[str]], columns: list[str] = COLUMNS) -> str:
    """Return a Markdown table with one column per cell."""
    header = [*head.split("|"), *columns]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines)) + "\n"


def show(row: dict[str, Any], *, has_range: bool = False, has_steps: bool = False) -> str:
    """Return tok/s (speed-up, tokens/step) of a row."""
    rate = f"{row['tokens_per_second']:.0f}"
    if row["speedup"] is None:
        return rate
    shown = f"{row['speedup']:.2f}x"
    shown += " [{:.2f}, {:.2f}]".format(*row["speedup_spread"]) if has_range else ""
    return f"{rate} ({shown}, {row['tokens_per_step']:.2f})" if has_steps else f"{rate} ({shown})"


def headline() -> str:
    """Return README's table."""
    rows = read("serve-smollm2-cpu")
    shown = {"its head": "smollm2 [hmm]", "ngram (vLLM's own)": "ngram"}
    lines = [[name, *(f"{rows[key][cell]['speedup']:.2f}x" for cell in CELLS)] for name, key in shown.items()]
    plain = ["plain vLLM, tok/s", *(show(rows["plain"][cell]) for cell in CELLS)]
    return table(f"SmolLM2-135M-Instruct, commit {content('serve-smollm2-cpu')['commit'][:8]}", [plain, *lines])


def served(name: str, has_steps: bool = False, names: Mapping[str, str] | None = None) -> str:
    """Return a table of speeds with their ranges, of the measured settings; names: of decodings in the table."""
    rows, names = read(name), names or {}
    cells = [cell for cell in CELLS if cell in rows["plain"]]
    lines = [
        [names.get(decoding, decoding), *(show(row[cell], has_range=True, has_steps=has_steps) for cell in cells)]
        for decoding, row in rows.items()
    ]
    return table("", lines, [column for cell, column in zip(CELLS, COLUMNS, strict=True) if cell in cells])


def identical(name: str, ours: bool) -> str:
    """Return how many greedy outputs equal plain vLLM's; a decoding has one check for all its cells."""
    found = [one[0.0, 1] for one in read(name).values()]
    checks = [row["identical"] for row in found if row["identical"] and row["ours"] == ours]
    same, asked = map(sum, zip(*checks, strict=True))
    return f"{same:,} of {asked:,}"


def draft() -> str:
    """Return the milliseconds of drafts of the packaged heads at T=1: median (quartiles)."""
    kept = content("draft-demo-cpu")
    rows: dict[str, dict[int, str]] = {}
    for row in kept["rows"]:
        key = f"{row['head'].split()[0]}|{row['weight_bytes'] / 2**20:.1f} MiB"
        rows.setdefault(key, {})[row["batch"]] = "{:.2f} ({:.2f} to {:.2f})".format(*row["draft_ms"])
    lines = [[*key.split("|"), *(ms[batch] for batch in (1, 16, 64))] for key, ms in rows.items()]
    columns = [f"batch {batch}" for batch in (1, 16, 64)]
    return f"{kept['how']['dtype']}, {kept['how']['threads']} CPU thread; median (quartiles):\n\n" + table(
        "head|weights read", lines, columns
    )


BLOCKS: dict[str, Callable[[], str]] = {
    "headline": headline,
    "chat": partial(served, "serve-smollm2-cpu", has_steps=True),
    "identical chat": partial(identical, "serve-smollm2-cpu", ours=True),
    "draft": draft,
}
