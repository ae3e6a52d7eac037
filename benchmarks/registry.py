"""The registry of results: ``python -m benchmarks.registry [--stale | --commands | --write benchmarks/RESULTS.md]``.

A result is stale if its paths (`registry.yaml`) differ from those of its commit: weights, or code in more than comments
and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from vllm_mtpc.engine.provenance import RESULTS, ROOT

FILE = Path(__file__).with_suffix(".yaml")
BEGIN, END = "<!-- results -->", "<!-- end of the results -->"
COLUMNS = ("what", "command", "file", "where it ran", "measured", "older than its code")
SHOWN = 4  # changed files that a line names


class Result(BaseModel):
    """Results of one command.

    Attributes:
        what, link: the name, and the page of the tables.
        files: names in benchmarks/results without .json.
        where: hardware.
        code: names of paths.
        old: why a stale result was not measured again.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: str
    link: str
    command: str
    files: tuple[str, ...]
    where: str
    code: tuple[str, ...]
    old: str | None = None


@cache
def read() -> tuple[dict[str, list[str]], list[Result]]:
    """Return the paths by name, and the results."""
    values = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return values["code"], [Result.model_validate(one) for one in values["results"]]


def kept(name: str) -> dict[str, Any]:
    """Return the content of a result file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def measured_on(name: str) -> dict[str, str]:
    """Return the days of the commits of a result; distributions have one for each case."""
    values = kept(name)
    return {one["commit"].partition("+")[0]: one["time"][:10] for one in values.get("cases", {"": values}).values()}


def changed_code(commit: str, paths: list[str]) -> Iterator[str]:
    """Yield the Python files and weights of the paths that differ from those of a commit."""
    try:
        differing = git("diff", "--name-only", "--no-renames", commit, "--", *paths).splitlines()
    except subprocess.CalledProcessError:
        differing = []
        yield f"commit {commit[:9]} is not in the history"
    for name in differing:
        if name.endswith(".safetensors") or (name.endswith(".py") and code_at(commit, name) != code_at(None, name)):
            yield name


@cache
def code_at(commit: str | None, name: str) -> str:
    """Return the code of a file without comments and docstrings, as of a commit or now; "" where there is none."""
    try:
        text = (ROOT / name).read_text(encoding="utf-8") if commit is None else git("show", f"{commit}:{name}")
    except (OSError, subprocess.CalledProcessError):
        return ""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        has_docstring = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if has_docstring and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def changes(result: Result) -> Iterator[tuple[str, str]]:
    """Yield each file of a result with code that changed since its commit; nothing: the result is current."""
    paths = [path for name in result.code for path in read()[0][name]]
    for name in result.files:
        yield from ((name, code) for commit in measured_on(name) for code in changed_code(commit, paths))


def table() -> str:
    """Return the results as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for one in read()[1]:
        days = sorted({day for name in one.files for day in measured_on(name).values()})
        span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        command = one.command if one.command == "see there" else f"`{one.command}`"
        files = ", ".join(f"`{name}.json`" for name in one.files)
        lines.append(f"| [{one.what}]({one.link}) | {command} | {files} | {one.where} | {span} | {one.old or ''} |")
    return "\n".join([*lines, ""])


def page(text: str) -> str:
    """Return the text of RESULTS.md with a new table."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + "\n" + table() + "\n" + END + rest.partition(END)[2]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.registry", description=__doc__.splitlines()[0])
    parser.add_argument("--stale", action="store_true", help="list stale results without a reason; exit 1 if any")
    parser.add_argument(
        "--commands", nargs="*", metavar="NAME", help="print commands of these stale results, or of all"
    )
    parser.add_argument("--write", type=Path, metavar="RESULTS.md", help="write the table of the page")
    args = parser.parse_args(arguments)
    if args.write:
        args.write.write_text(page(args.write.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    number = 0
    for result in read()[1]:
        changed: dict[str, set[str]] = {}
        for name, code in changes(result):
            changed.setdefault(name, set()).add(code)
        if not changed or (args.stale and result.old):
            continue
        number += 1
        if args.commands is not None:
            if not args.commands or set(args.commands) & {*result.files}:
                print(result.files[0] if len(result.files) == 1 else "-", result.command, sep="\t")
            continue
        for name, code in changed.items():
            more = f" and {len(code) - SHOWN} more" if len(code) > SHOWN else ""
            print(f"{name}.json: {', '.join(sorted(code)[:SHOWN])}{more}; {result.old or 'no reason in registry.yaml'}")
    return int(args.stale and number > 0)


if __name__ == "__main__":
    sys.exit(main())
