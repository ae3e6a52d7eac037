"""The feature page, benchmarks/FEATURES.md: what works with drafts on, as the kept runs of the tests found it.

    scripts/test.sh --all --outcome=benchmarks/results/tests-all.json
    python -m tests.support.features --write benchmarks/FEATURES.md

A test names the cells it fills: `@pytest.mark.feature("top_k", "distribution", "mtpc on V1")`, or its columns by
`@pytest.mark.column("mtpc on V1")` on it or its parameters. Only a test that passed in a kept run fills a cell.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.claims import KEPT

V1, V2, PTP = COLUMNS = ("mtpc on V1", "mtpc on V2", "ptp on V2")
KINDS = {"distribution": "distribution", "exact": "exact", "refused": "refused", "off": "turned off"}  # as shown
HEADER = """# Features

Features of requests and engines with drafts. Written by `python -m tests.support.features --write
benchmarks/FEATURES.md` from kept runs of the tests ([tests-all.json](results/tests-all.json)); do not edit it.

* **distribution**: tests compare the distribution of sampled text with enumeration, and find an injected fault.
* **exact**: tests compare tokens (and logprobs) with plain vLLM's, greedy or sharpened to be, drafts on and accepted.
  For `ptp` also at any temperature: with the text its sampler gives without drafts.
* **refused**: tests read the one-line message.
* **turned off** for such an engine, which a test checks. **not tested**: with the reason. **failed**.

V1 and V2 are vLLM's model runners; V2 ran on a CPU, its kernels interpreted. Numbers name the tests below.
"""

# Rows in their order.
ROWS = """temperature; top_k; top_p; min_p, logit_bias; presence penalty; frequency penalty; repetition penalty;
logprobs; prompt logprobs; logprobs_mode: all four; seed: the same text in any batch; seed: the text of
plain vLLM; n > 1; stop strings; stop_token_ids; min_tokens; bad_words; allowed_token_ids; ignore_eos, end
of text; mtpc_drafts of a request; a head swapped while serving; JSON object; JSON schema; regex; grammar;
choice; sampling under a grammar; drafts masked with the grammar; chat, streaming, tool calls; LoRA requests
on the target; prefix caching; chunked prefill; preemption by recompute; asynchronous scheduling;
synchronous scheduling; max_model_len reached; 8-bit target (int8, compressed-tensors); 4-bit target (int4
weights, compressed-tensors); eager; torch.compile; CUDA graphs; sleep and wake; tensor parallel; pipeline
parallel; data parallel"""
ROWS = [" ".join(row.split()) for row in ROWS.split(";")]
UNTESTED = {  # why no test can show it yet
    ("seed: the text of plain vLLM", PTP): "it has its own random numbers, with and without drafts",
    ("torch.compile", V2): "inductor does not run in the interpreter",
    ("torch.compile", PTP): "inductor does not run in the interpreter",
    **{("CUDA graphs", column): "needs a GPU" for column in COLUMNS},
    **{("sleep and wake", column): "vLLM's sleep mode needs a GPU's allocator" for column in COLUMNS},
}


def cells_of(item: pytest.Item) -> list[list[str]]:
    """Return the cells that the marks of a test name: [row, column, kind, why] each.

    Raises:
        UsageError: the page has no such cell.
    """
    named = [name for mark in item.iter_markers("column") for name in mark.args]
    cells = []
    for mark in item.iter_markers("feature"):
        row, kind, *columns = mark.args
        for column in columns or named or [None]:
            if row not in ROWS or kind not in KINDS or column not in COLUMNS:
                raise pytest.UsageError(f"{item.nodeid}: feature {mark.args}, columns {named}: not in {__file__}")
            cells.append([row, column, kind, mark.kwargs.get("why", "")])
    return cells


def page() -> str:
    """Return the text of benchmarks/FEATURES.md from the kept run of the tests."""
    outcome = json.loads(KEPT.read_text(encoding="utf-8"))
    shown: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for cell in outcome["cells"]:
        shown[cell["feature"], cell["column"]].append(cell)
    numbers: dict[str, int] = {}  # of the tests
    table = ["| feature | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in ROWS:
        cells = [_cell(shown[row, column], UNTESTED.get((row, column)), numbers) for column in COLUMNS]
        table.append(f"| {row} | {' | '.join(cells)} |")
    versions, hardware = outcome["versions"], outcome["hardware"]
    device = ", ".join(hardware.get("gpus") or []) or f"{hardware['cores']} CPU cores"
    entries = [entry for kinds in outcome["tests"].values() for entry in kinds.values()]
    passed, failed, skipped = (sum(entry[end] for entry in entries) for end in ("passed", "failed", "skipped"))
    runs = sorted({(entry["day"], entry["commit"]) for entry in [*entries, *outcome["cells"]]})
    ran = f"The runs: {', '.join(f'{day} (`{commit[:9]}`)' for day, commit in runs)}; {device}, vLLM "
    ran += f"{versions['vllm']}, Python {versions['python']}. Each test counts as it last ran: {passed} passed "
    older = sum(entry["passed"] for entry in entries if entry["commit"] != outcome["commit"])
    ran += f"({older} of them at earlier commits than `{outcome['commit'][:9]}`), "
    ran += f"{failed} failed, {skipped} were skipped. `python -m tests.claims` lists them."
    days = {cell["test"]: cell["day"] for cell in outcome["cells"]}
    tests = [f"{number}. `tests/{test.replace('::', '`: `')}`, {days[test]}" for test, number in numbers.items()]
    return "\n".join([HEADER, ran, "", *table, "", "## Tests", "", *tests, ""])


def _cell(shown: list[dict[str, Any]], untested: str | None, numbers: dict[str, int]) -> str:
    """Failed where a test failed; else what the passed tests show."""
    kept = [cell for cell in shown if cell["failed"]] or [cell for cell in shown if cell["passed"]]
    if not kept:
        return "not tested: " + (untested or "no test of it has run")
    parts = []
    for kind, title in KINDS.items():
        cells = [cell for cell in kept if cell["kind"] == kind]
        links = " ".join(f"[{numbers.setdefault(cell['test'], len(numbers) + 1)}]" for cell in cells)
        why = "; ".join(dict.fromkeys(cell["why"] for cell in cells if cell["why"]))
        if cells:
            parts.append(f"{'**failed**' if kept[0]['failed'] else title} {links}" + (f": {why}" if why else ""))
    return ", ".join(parts)


def write_page(arguments: list[str], text: Callable[[], str]) -> None:
    """The command `--write FILE` of a generated page."""
    if len(arguments) != 2 or arguments[0] != "--write":
        sys.exit("usage: --write FILE")
    Path(arguments[1]).write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    write_page(sys.argv[1:], page)
