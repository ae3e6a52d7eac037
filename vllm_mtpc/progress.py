"""A bar of progress that also reads well in a file: there, lines in place of a line that is drawn over."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 15
LINE = "{desc}: {n_fmt}/{total_fmt} {unit}, {elapsed} so far, {remaining} left{postfix}"
LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit}, {elapsed} so far{postfix}"


class Bar(tqdm):
    """tqdm; where stderr is no terminal, a line at most every 15 s. `seconds_left` replaces tqdm's own estimate."""

    _last, seconds_left = "", 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        if not sys.stderr.isatty():
            has_total = bool(args) or options.get("total") is not None
            options |= {"mininterval": LINE_SECONDS, "maxinterval": LINE_SECONDS, "leave": True}
            options["bar_format"] = LINE if has_total else LINE_WITHOUT_TOTAL
        super().__init__(*args, **options)

    @property
    def format_dict(self) -> dict[str, Any]:
        values = super().format_dict
        return values | ({"rate": (self.total - self.n) / self.seconds_left} if self.seconds_left else {})

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        if sys.stderr.isatty():
            super().display(msg, pos)
        elif (line := (str(self) if msg is None else msg).strip()) not in ("", self._last):
            self._last = line
            self.fp.write(line + "\n")
            self.fp.flush()
