"""Check the place of a result before it is measured; write and print the result."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
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
    _check_place(file, file.parent, flag)


def check_folder(folder: Path | None, flag: str = "--out") -> None:
    """Make a folder; raise UsageError if nothing can be written to it. None: nothing is checked."""
    if folder is not None:
        _check_place(folder, folder, flag)


def _check_place(path: Path, folder: Path, flag: str) -> None:
    kind = "folder" if path == folder else "file"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and kind == "file":
            raise OSError(0, "a folder")
        place, right = (path, os.W_OK) if path.is_file() else (folder, os.W_OK | os.X_OK)
        if not os.access(place, right):
            raise OSError(0, "no right to write to it")
    except OSError as error:
        reason = "a file is in the place of a folder" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"{flag} {path}: cannot be written to ({reason}); name another {kind}") from None


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
