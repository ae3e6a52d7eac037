"""A table of a paper: its measurement, the paper's numbers, and their presentation.

A table has the rows of benchmarks/results/paper-NAME.json; benchmarks/PAPERS.md is made from these files and from the
definitions. The papers' own numbers are in published.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.findings import claims
from vllm_mtpc.engine import provenance
from vllm_mtpc.report import check_file, markdown, write_json

Row = Mapping[str, Any]  # a cell by its column's key
PAPERS = {
    "mtpc": "Fast and Expressive Multi-Token Prediction with Probabilistic Circuits",
    "ptp": "Parallel Token Prediction for Language Models, arXiv 2512.21323",
}
PUBLISHED = Path(__file__).with_name("published.json")
DIGITS = 3


@dataclass(frozen=True)
class Table:
    """One table or figure of a paper."""

    title: str
    columns: Mapping[str, str]  # key of a row -> header
    measure: Callable[[], Iterable[Row]] | None  # None: not run, or not any more
    differs: str  # differences in size to the paper, or the reason for not running it
    remark: str  # what limits the comparison; what the rows say of the paper's claims is computed (`findings.py`)
    draw: Callable[[Sequence[Row], Path], None] | None = None  # rows, file -> a figure
    view: Callable[[], Iterable[Row]] | None = None  # rows of `students.py`


def rows_of(name: str, table: Table) -> list[Row]:
    """Return the rows of a table; none where it was not run."""
    if table.view is not None:
        return list(table.view())
    file = result(name)
    return json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []


def result(name: str) -> Path:
    """The file of a table's rows."""
    return provenance.RESULTS / f"paper-{name}.json"


def figure(name: str) -> Path:
    """The file of its figure."""
    return provenance.FIGURES / f"paper-{name}.svg"


def run(name: str, table: Table) -> Path:
    """Measure a table; return the file that was written."""
    file = result(name)
    check_file(file)
    rows = [dict(row) for row in table.measure()]
    write_json(file, {"title": table.title, **provenance.collect(), "rows": rows})
    if table.draw is not None:
        table.draw(rows, figure(name))
    return file


def shown(value: Any) -> str:
    """A cell as it is printed."""
    if value is None:
        return ""
    return f"{value:.{DIGITS}f}" if isinstance(value, float) else str(value)


def section(name: str, table: Table) -> str:
    """Return the section of a table, or a note that it was not run."""
    paper, _, number = name.partition("-")
    label = {"mtpc": "MtPC", "ptp": "PTP"}[paper] + ", " + number.replace("-", " ")
    parts, found = [f"### {label}: {table.title}"], ""
    if rows := rows_of(name, table):
        lines = [[shown(row.get(key)) for key in table.columns] for row in rows]
        found = "\n".join(claim.line() for claim in claims(name, rows))
        source = f"`{result(name).name}`, by `benchmarks/paper/run.sh {name}`"
        if table.view:
            source = "`paper-ptp-students.json`, by `python -m benchmarks.paper.students`"
        elif not table.measure:
            commit = json.loads(result(name).read_text(encoding="utf-8"))["commit"]
            source += f" of commit `{commit[:9]}`"
        parts += [f"{table.differs} {source}.", markdown(list(table.columns.values()), lines)]
        if figure(name).is_file():
            parts.append(f"![{table.title}](../docs/figures/{figure(name).name})")
    else:
        parts.append(f"Not run. {table.differs}")
    if theirs := published().get(name):
        parts += [f"The paper: {theirs.get('note', 'its own numbers.')}", markdown(theirs["columns"], theirs["rows"])]
    return "\n\n".join([*parts, *filter(None, [found, table.remark])])


def published() -> dict[str, Any]:
    """The papers' own numbers by name of a table: columns, rows of strings, a note where one is needed."""
    return json.loads(PUBLISHED.read_text(encoding="utf-8"))


def document(tables: Mapping[str, Table], text: str) -> str:
    """benchmarks/PAPERS.md with the sections between its markers made again, one pair of markers for each paper."""
    for paper, title in PAPERS.items():
        sections = [section(name, table) for name, table in tables.items() if name.startswith(f"{paper}-")]
        text = between_markers(text, paper, "\n\n".join([f"## {title}", *sections]))
    return text


def summary(tables: Mapping[str, Table], text: str) -> str:
    """docs/papers.md with the tables of claims between its markers made again."""
    for paper in PAPERS:
        lines: list[list[str]] = []
        for name, table in ((name, table) for name, table in tables.items() if name.startswith(f"{paper}-")):
            shown = " ".join(name.split("-")[1:])
            rows = rows_of(name, table)
            found = [(claim.text, claim.verdict) for claim in claims(name, rows)] if rows else [("", "not run")]
            lines += [[f"{shown}: {table.title}", *one] for one in found]
        text = between_markers(text, paper, markdown(["table", "claim", "here"], lines))
    return text


def between_markers(text: str, paper: str, new: str) -> str:
    """Return a text with a new part between the markers of a paper."""
    words = ("written", "end of text written")
    start, end = (f"<!-- {paper}: {word} by python -m benchmarks.paper --write -->" for word in words)
    before, _, rest = text.partition(start)
    return f"{before}{start}\n\n{new}\n\n{end}{rest.partition(end)[2]}"
