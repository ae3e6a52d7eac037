"""Write the numbers and tables of README.md, docs and RESULTS.md from their files: ``python -m benchmarks.numbers``.

A table is between ``<!-- NAME: made by benchmarks.numbers -->`` and ``<!-- end -->``; NAME is a key of ``BLOCKS``. A
number in a sentence is between ``<!-- FILE PATH FORMAT -->`` and ``<!-- end -->``: FILE is a result, or a packaged head
(``head/btree``: its provenance.json), PATH leads to the value (``rows[head=plain,clients=1].step_ms``), FORMAT
is Python's (``.2f``, ``.9s`` for a commit).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from benchmarks import result_tables, serve_tables, train_cost
from benchmarks.peers import tables as peers
from benchmarks.result_tables import cell
from benchmarks.serve_tables import content, table
from vllm_mtpc.engine import provenance

BLOCK = re.compile(r"(<!-- ([\w ]+): made by benchmarks\.numbers -->\n?).*?(<!-- end -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- ([\w/-]+) (\S+) ([.,\d]*[%fds]) -->).*?(<!-- end -->)", re.DOTALL)
STEP = re.compile(r"(\w+)(?:\[([^]]+)\])?\.?")
PAGES = [
    "README.md",
    "benchmarks/RESULTS.md",
    *sorted(f"docs/{file.name}" for file in (provenance.ROOT / "docs").glob("*.md")),
]
HEADS = ("ff", "cp", "hmm", "btree", "backbone", "o-ptp", "c-ptp", "late")


def value(file: str, path: str) -> Any:
    """Return the value at a path of a file; [key=value,...] chooses the only such part of a list."""
    found = content(file)
    for key, choice in STEP.findall(path):
        found = found[int(key) if isinstance(found, list) else key]
        if choice:
            wanted = dict(pair.split("=", 1) for pair in choice.split(","))
            (found,) = (one for one in found if all(f"{one[name]}" == text for name, text in wanted.items()))
    return found


def expected() -> str:
    """Return the table of the packaged heads."""
    lines = [[f"T={t[1]}", *(cell(content(f"head/{name}")["figures"][t]) for name in HEADS)] for t in ("t1", "t0")]
    return table("", lines, list(HEADS))


def pass_costs() -> str:
    """Return the speed of both passes by arithmetic, next to plain decoding."""
    lines = []
    for row in content("ptp-pass-costs")["rows"]:
        tokens = [f"{row[key]:.2f}" for key in ("two_pass_tokens", "merged_tokens")]
        speeds = [f"{row[key]:.2f}x" for key in ("two_pass", "merged", "captured")]
        lines.append([f"{row['target']}, {row['batch']}", row["accepted"], *tokens, *speeds])
    columns = [
        "drafts right",
        "tokens/step, two passes",
        "tokens/step, merged",
        "speed, two passes",
        "speed, merged",
        "speed, merged if captured",
    ]
    return table("target, requests", lines, columns)


def launches() -> str:
    """Return the table of launches and bytes of a draft."""
    heads = {
        "ff": "shared ff V=128256",
        "btree r=8, a row for each component": "shared btree r=8 V=128256",
        "btree r=8, `component_rank` 16": "shared btree r=8 c=16 V=128256",
        "btree r=8, `component_rank` 16, `token_rank` 32": "shared btree r=8 c=16 t=32 V=128256",
        "btree on a backbone of 5 layers of Qwen3 8B": "backbone btree r=8 c=16 V=151936",
        "PTP on the 36 layers of Qwen3 8B, merged pass": "PTP merged V=151936",
    }
    rows = {(row["head"], row["batch"]): row for row in content("launches")["rows"]}
    lines = []
    for shown, name in heads.items():
        few, many = rows[name, 32], rows[name, 256]
        ratios = [f"{row['bytes'] / row['ideal_bytes']:.2f}x" for row in (few, many)]
        lines.append([shown, str(few["operations"] + few["triton"]), *ratios])
    return table("head", lines, ["launches", "bytes of the least, 32 requests", "256 requests"])


def gpu_drafts() -> str:
    """Return the table of drafts on a GPU, next to a step of a target of that size."""
    lines = []
    for row in content("gpu-draft")["rows"]:
        head, batch, step = row["head"].partition(" n=")[0], row["batch"], row["step_ms"]
        share = row["captured_ms"][0] / step
        milliseconds = [f"{ms:.3f}" for ms in (row["captured_ms"][0], row["floor_ms"])]
        lines.append([f"{head}, batch {batch}", *milliseconds, f"{step:.2f}", f"{share:.1%}"])
    return table("head", lines, ["draft ms", "weights read, ms", "step of the target, ms", "draft / step"])


BLOCKS: dict[str, Callable[[], str]] = {
    **serve_tables.BLOCKS,
    **result_tables.BLOCKS,
    "training cost": train_cost.table,
    "expected": expected,
    "pass costs": pass_costs,
    "launches": launches,
    "gpu drafts": gpu_drafts,
    **peers.BLOCKS,
}


def fill(text: str) -> str:
    """Return a document with all its tables and numbers made again."""
    text = BLOCK.sub(lambda found: found[1] + BLOCKS[found[2]]() + found[3], text)
    return VALUE.sub(lambda found: f"{found[1]}{value(found[2], found[3]):{found[4]}}{found[5]}", text)


def main() -> None:
    """Write the documents."""
    for name in PAGES:
        file = provenance.ROOT / name
        file.write_text(fill(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
