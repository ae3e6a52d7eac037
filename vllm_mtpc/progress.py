"""A bar of progress that also reads well in a file: there, lines in place of a line that is drawn over."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm

LINE_SECONDS = 15
LINE = "{desc}: {n_fmt}/{total_fmt} {unit}, {elapsed} so far, {remaining} left{postfix}"
LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit}, {elapsed} so far{postfix}"


class Bar(tqdm):
    """tqdm; where stderr is no terminal, a line at most every 15 s."""

    def __init__(self, *args: Any, **options: Any) -> None:
        if not sys.stderr.isatty():
            has_total = bool(args) or options.get("total") is not None
            options |= {"mininterval": LINE_SECONDS, "maxinterval": LINE_SECONDS, "leave": True}
            options["bar_format"] = LINE if has_total else LINE_WITHOUT_TOTAL
        super().__init__(*args, **options)

    @staticmethod
    def status_printer(file: TextIO) -> Callable[[str], None]:
        if sys.stderr.isatty():
            return tqdm.status_printer(file)

        last = ""

        def write(text: str) -> None:
            nonlocal last
            if text.strip() and text != last:
                file.write(text.strip() + "\n")
                file.flush()
            last = text

        return write
