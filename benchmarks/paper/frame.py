"""A claim of a paper: the rows of kept results that test it, the paper's numbers, and their presentation.

benchmarks/PAPERS.md and the tables of docs/papers.md are made from the results and from these definitions. The papers'
own numbers are in published.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.paper.findings import Claim
from vllm_mtpc.report import markdown

Row = Mapping[str, Any]  # a cell by its column's key
PAPERS = {
    "mtpc": "Fast and Expressive Multi-Token Prediction with Probabilistic Circuits",
    "ptp": "Parallel Token Prediction for Language Models, arXiv 2512.21323",
}
PUBLISHED = Path(__file__).with_name("published.json")
DIGITS = 3


@dataclass(frozen=True)
class Table:
    """The rows for one claim of a paper.

    Attributes:
        title: the claim, and the paper's tables of it.
        about: sizes and source of the rows; of a claim without rows why it has none.
        columns: key of a row -> header.
        rows: reads them from kept results; None: not measured.
        claims: what the rows say of the claim.
        published: the paper's numbers, a key of published.json.
        remark: limits of the comparison.
    """

    title: str
    about: str
    columns: Mapping[str, str] = field(default_factory=dict)
    rows: Callable[[], Sequence[Row]] | None = None
    claims: Callable[[Sequence[Row]], Iterable[Claim]] = lambda rows: ()
    published: str = ""
    remark: str = ""


def shown(value: Any) -> str:
    """Format a cell."""
    return f"{value:.{DIGITS}f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def section(paper: str, table: Table) -> str:
    """Return the section of a table."""
    parts, found = [f"### {({'mtpc': 'MtPC', 'ptp': 'PTP'})[paper]}: {table.title}"], ""
    if table.rows:
        rows = table.rows()
        lines = [[shown(row[key]) for key in table.columns] for row in rows]
        parts += [table.about, markdown([*table.columns.values()], lines)]
        found = "\n".join(claim.line() for claim in table.claims(rows))
    else:
        parts.append(f"Not measured on this model. {table.about}".strip())
    if table.published:
        theirs = published()[table.published]
        parts += [f"The paper: {theirs['note']}", markdown(theirs["columns"], theirs["rows"])]
    return "\n\n".join([*parts, *filter(None, [found, table.remark])])


def published() -> dict[str, Any]:
    """Return the papers' own numbers: columns, rows of strings, and a note."""
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def document(tables: Mapping[str, Sequence[Table]], text: str) -> str:
    """Return benchmarks/PAPERS.md with the sections of both papers made again."""
    for paper, title in PAPERS.items():
        sections = [section(paper, table) for table in tables[paper]]
        text = between_markers(text, paper, "\n\n".join([f"## {title}", *sections]))
    return text


def summary(tables: Mapping[str, Sequence[Table]], text: str) -> str:
    """Return docs/papers.md with the verdicts of both papers made again."""
    for paper in PAPERS:
        lines: list[list[str]] = []
        for table in tables[paper]:
            found = [(one.text, one.verdict) for one in table.claims(table.rows())] if table.rows else []
            lines += [[table.title, *one] for one in found or [("", "not measured")]]
        text = between_markers(text, paper, markdown(["claim of the paper", "rows", "here"], lines))
    return text


def between_markers(text: str, paper: str, new: str) -> str:
    """Return a text with a new part between the markers of a paper."""
    words = ("written", "end of text written")
    start, end = (f"<!-- {paper}: {word} by python -m benchmarks.paper --write -->" for word in words)
    before, _, rest = text.partition(start)
    return f"{before}{start}\n\n{new}\n\n{end}{rest.partition(end)[2]}"
