"""The registry of results; ``python -m benchmarks.registry`` writes its table to benchmarks/RESULTS.md.

``--stale`` prints each result of older code that was not measured again, and why; the exit code is 1 if there is one.

A result records git's hashes of the folders of code and of its script (``provenance.collect``); tests compare them with
its commit. If parts of it have their own commits, each counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from vllm_mtpc.engine import provenance

FILE, RESULTS_PAGE = Path(__file__).with_suffix(".yaml"), Path(__file__).with_name("RESULTS.md")
BEGIN, END = "<!-- results -->", "<!-- end of the results -->"
COLUMNS = ("what", "command", "file", "where it ran", "measured", "why not again")
SHOWN = 3  # commits that a line names


class Result(BaseModel):
    """Results of one command.

    Attributes:
        what, link: the name, and the page of the tables.
        files: names in benchmarks/results without .json.
        where: hardware.
        old: why a result of older code was not measured again.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: str
    link: str
    command: str
    files: tuple[str, ...]
    where: str
    old: str | None = None


@cache
def read() -> list[Result]:
    return [Result.model_validate(one) for one in yaml.safe_load(FILE.read_text(encoding="utf-8"))["results"]]


def kept(name: str) -> dict[str, Any]:
    """Return the content of a result file."""
    return json.loads((provenance.RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def entries(values: Any) -> Iterator[dict[str, Any]]:
    """Yield each part of a result, and the result itself, that names a commit."""
    if isinstance(values, dict):
        yield from [values] if "commit" in values else []
        values = list(values.values())
    for one in values if isinstance(values, list) else []:
        yield from entries(one)


def measured_on(values: Any) -> dict[str, str]:
    """Return the days of the commits of a result; each case, or pass of a test, can have its own."""
    dated = [one for one in entries(values) if {"day", "time"} & one.keys()]
    return {one["commit"]: one.get("day") or one["time"][:10] for one in dated}


def trees_of(values: Any) -> dict[str, dict[str, str]]:
    """Return the hashes that a result records of each of its commits."""
    found: dict[str, dict[str, str]] = {}
    for one in entries(values):
        found[one["commit"]] = found.get(one["commit"], {}) | one.get("trees", {})
    return found


def table() -> str:
    """Return the results as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for one in read():
        found = {commit: day for name in one.files for commit, day in measured_on(kept(name)).items()}
        days = sorted({*found.values()})
        span = f"{' to '.join([days[0], *days[1:][-1:]])} at {shown(sorted(found))}"
        command = one.command if one.command == "see there" else f"`{one.command}`"
        files = ", ".join(f"`{name}.json`" for name in one.files)
        lines.append(f"| [{one.what}]({one.link}) | {command} | {files} | {one.where} | {span} | {one.old or ''} |")
    return "\n".join([*lines, ""])


def shown(commits: Collection[str]) -> str:
    """Return a few commits, or how many there are."""
    return (
        ", ".join(f"`{one[:9]}{one[40:]}`" for one in commits) if len(commits) <= SHOWN else f"{len(commits)} commits"
    )


def page(text: str) -> str:
    """Return the text of RESULTS.md with a new table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


def stale() -> list[str]:
    """Return the name of each result of older code, with the reason why it was not measured again."""
    return [f"{one.what}: {one.old}" for one in read() if one.old]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.registry", description=__doc__.splitlines()[0])
    parser.add_argument("--stale", action="store_true", help="print the results of older code instead")
    args = parser.parse_args(arguments)
    if args.stale:
        found = stale()
        print(*found, sep="\n", end="\n" if found else "")
        return 1 if found else 0
    RESULTS_PAGE.write_text(page(RESULTS_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
