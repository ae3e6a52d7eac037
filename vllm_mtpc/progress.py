"""A progress bar that writes lines where stderr is a file."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 15
LINE = "{desc}: {n_fmt}/{total_fmt}{unit}, {rate_fmt}, {elapsed} so far, {remaining} left{postfix}"
LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit}, {rate_fmt}, {elapsed} so far{postfix}"


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
