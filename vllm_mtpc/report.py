"""Check the place of a result before it is measured, show progress, and write and print the result."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import UsageError

SERVED = "bench serve"  # the kind of its results
LINE_SECONDS = 15
LINE = "{desc}: {n_fmt}/{total_fmt}{unit}, {rate_fmt}, {elapsed} so far, {remaining} left{postfix}"
LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit}, {rate_fmt}, {elapsed} so far{postfix}"


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
        if kind == "file" and path.exists():
            open(path, "ab").close()
        else:
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be written to ({error.strerror}); name another {kind}") from None


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Write a result to a file that `check_file` has checked."""
    file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def print_table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, rendered on a terminal."""
    text = f"\n{title}\n\n" + markdown(header, lines)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console(highlight=False).print(Markdown(text))
    else:
        print(text, flush=True)


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])


class Bar(tqdm):
    """tqdm; where stderr is no terminal, a line at most every 15 s."""

    _last = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        options["unit"] = f" {options.get('unit', '').strip()}"
        if not sys.stderr.isatty():
            has_total = bool(args) or options.get("total") is not None
            options |= {"mininterval": LINE_SECONDS, "maxinterval": LINE_SECONDS, "leave": True}
            options["bar_format"] = LINE if has_total else LINE_WITHOUT_TOTAL
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if sys.stderr.isatty():
            super().display(msg, pos)
        elif (line := (str(self) if msg is None else msg).strip()) not in ("", self._last):
            self._last = line
            self.fp.write(line + "\n")
            self.fp.flush()
