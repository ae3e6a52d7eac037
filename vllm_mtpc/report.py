"""Check the place of a result before it is measured; write and print the result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

SERVED = "bench serve"  # the kind of the results that `vllm-mtpc plot` draws


def check_file(file: Path | None, flag: str = "--json") -> None:
    """Make the folder of a result; raise UsageError if the file cannot be written. None: nothing is checked.

    Results in `benchmarks/results/` name the measured commit, so a changed checkout cannot write there.
    """
    if file is None:
        return
    if file.resolve().parent == provenance.RESULTS and (provenance.commit() or "").endswith(provenance.CHANGED):
        raise UsageError(f"{flag} {file}: the checkout differs from its commit; commit first, or name another folder")
    with _refused(f"{flag} {file}", "file"):
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise OSError(0, "a folder" if file.is_dir() else "no right to write it")


def check_folder(folder: Path | None, flag: str = "--out") -> None:
    """Make a folder; raise UsageError if nothing can be written to it. None: nothing is checked."""
    if folder is None:
        return
    with _refused(f"{flag} {folder}", "folder"):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(0, "no right to write to it")


@contextmanager
def _refused(place: str, kind: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = "a file is in the place of a folder" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"{place}: cannot be written to ({reason}); name another {kind}") from None


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Write a result to a file that `check_file` has checked."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def console() -> Console:
    """Return the console of tables: as wide as the terminal, 120 columns in a file."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a rich table on a terminal, and Markdown elsewhere."""
    if not sys.stdout.isatty():
        print(f"\n{title}\n\n" + markdown(header, lines), flush=True)
        return
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for place, name in enumerate(header):
        table.add_column(name, justify="left" if place < 2 else "right")
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        table.add_row(*line, end_section="=" in line[0] and following is not None and following[0] != line[0])
    console().print(table, markup=False)


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])
