"""The feature page, docs/features.md: what works with drafts on, as a run of all tests found it.

    scripts/test.sh --all --outcome=benchmarks/results/tests-all.json
    python -m tests.support.features --write docs/features.md

A test says what it shows: `@pytest.mark.feature("top_k", "distribution")`, for the columns that are named behind or by
`@pytest.mark.column("mtpc on V1")` on it or its parameters. A cell claims only what a passed test of the kept run says.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
V1, V2, PTP = COLUMNS = ("mtpc on V1", "mtpc on V2", "ptp on V2")
RUNNERS = [pytest.param(name, marks=pytest.mark.column(column)) for name, column in (("v1", V1), ("v2", V2))]
KINDS = {
    "distribution": "distribution",
    "exact": "exact",
    "refused": "refused",
    "off": "turned off",
}  # as they are shown, in this order
HEADER = """# Features

What a request or an engine may ask for with drafts on. Written by `python -m tests.support.features --write
docs/features.md` from what a run of the tests found ([tests-all.json](../benchmarks/results/tests-all.json)); not to be
edited.

* **distribution**: tests compare the distribution of sampled text with enumeration, and find an injected fault.
* **exact**: tests compare tokens (and logprobs) with plain vLLM's, greedy or sharpened to be, drafts on and accepted.
  For `ptp` also at any temperature: with the text its sampler gives without drafts.
* **refused**: tests read the one-line message.
* **turned off** for such an engine; tests look. **not tested**: and why. **failed**: so it did.

V1 and V2 are vLLM's model runners; V2 ran on a CPU, its kernels interpreted. Numbers name the tests below.
"""
INDUCTOR = {V2: "inductor does not run in the interpreter", PTP: "inductor does not run in the interpreter"}

# the rows in their order; what no test can show yet, and why
ROWS: dict[str, dict[str, str]] = {
    "temperature": {},
    "top_k": {},
    "top_p": {},
    "min_p, logit_bias": {},
    "presence penalty": {},
    "frequency penalty": {},
    "repetition penalty": {},
    "logprobs": {},
    "prompt logprobs": {},
    "logprobs_mode: all four": {},
    "seed: the same text in any batch": {},
    "seed: the text of plain vLLM": {PTP: "its tokens are picked by numbers of its own, with and without drafts"},
    "n > 1": {},
    "stop strings": {},
    "stop_token_ids": {},
    "min_tokens": {},
    "bad_words": {},
    "allowed_token_ids": {},
    "ignore_eos, end of text": {},
    "mtpc_drafts of a request": {},
    "a head swapped while serving": {},
    "JSON object": {},
    "JSON schema": {},
    "regex": {},
    "grammar": {},
    "choice": {},
    "sampling under a grammar": {},
    "drafts masked with the grammar": {},
    "chat, streaming, tool calls": {},
    "LoRA requests on the target": {},
    "prefix caching": {},
    "chunked prefill": {},
    "preemption by recompute": {},
    "asynchronous scheduling": {},
    "synchronous scheduling": {},
    "max_model_len reached": {},
    "8-bit target (int8, compressed-tensors)": {},
    "4-bit target (int4 weights, compressed-tensors)": {},
    "eager": {},
    "torch.compile": INDUCTOR,
    "CUDA graphs": dict.fromkeys(COLUMNS, "needs a GPU"),
    "sleep and wake": dict.fromkeys(COLUMNS, "vLLM's sleep mode needs a GPU's allocator"),
    "tensor parallel": {},
    "pipeline parallel": {},
    "data parallel": {},
}


def cells_of(item: pytest.Item) -> list[list[str]]:
    """What a test speaks for: [row, column, kind, why] each. Raises UsageError for what the page does not have."""
    named = [name for mark in item.iter_markers("column") for name in mark.args]
    cells = []
    for mark in item.iter_markers("feature"):
        row, kind, *columns = mark.args
        for column in columns or named:
            if row not in ROWS or kind not in KINDS or column not in COLUMNS:
                raise pytest.UsageError(f"{item.nodeid}: feature {mark.args}, columns {named}: not in {__file__}")
            cells.append([row, column, kind, mark.kwargs.get("why", "")])
        if not columns and not named:
            raise pytest.UsageError(f"{item.nodeid}: feature {row!r} of no column")
    return cells


def page(outcome: dict[str, Any]) -> str:
    """The text of docs/features.md from the JSON of a run (tests/support/outcome.py)."""
    said: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for cell in outcome["cells"]:
        said[cell["feature"], cell["column"]].append(cell)
    numbers: dict[str, int] = {}
    rows = [
        [_cell(said[row, column], untested.get(column), numbers) for column in COLUMNS]
        for row, untested in ROWS.items()
    ]
    table = ["| feature | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    table += [f"| {name} | {' | '.join(row)} |" for name, row in zip(ROWS, rows, strict=True)]
    skipped = sum(map(len, outcome["skipped"].values()))
    ran = f"The run: {outcome['time'][:10]}, commit `{outcome['commit']}`, vLLM {outcome['versions']['vllm']}; "
    ran += f"{outcome['passed']} tests passed, {len(outcome['failed'])} failed, {skipped} were skipped."
    tests = [
        f"{number}. `tests/{file}`: `{name}`" for test, number in numbers.items() for file, name in [test.split("::")]
    ]
    return "\n".join([HEADER, ran, "", *table, "", "## Tests", "", *tests, ""])


def _cell(said: list[dict[str, Any]], untested: str | None, numbers: dict[str, int]) -> str:
    """Failed where a test did; else what the tests show that have passed."""
    kept = [cell for cell in said if cell["failed"]] or [cell for cell in said if cell["passed"]]
    if not kept:
        return "not tested: " + (untested or "no test of it has run")
    parts = []
    for kind, title in KINDS.items():
        of_kind = [cell for cell in kept if cell["kind"] == kind]
        shown = " ".join(f"[{numbers.setdefault(cell['test'], len(numbers) + 1)}]" for cell in of_kind)
        why = "; ".join(dict.fromkeys(cell["why"] for cell in of_kind if cell["why"]))
        if of_kind:
            parts.append(f"{'**failed**' if kept[0]['failed'] else title} {shown}" + (f": {why}" if why else ""))
    return ", ".join(parts)


def main(arguments: list[str]) -> None:
    from tests.support import outcome

    if len(arguments) != 2 or arguments[0] != "--write":
        given = " ".join(arguments) or "nothing"
        sys.exit(f"given {given}; type: python -m tests.support.features --write docs/features.md")
    Path(arguments[1]).write_text(page(json.loads(outcome.KEPT.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
