"""Every table and figure of the two papers: ``python -m benchmarks.paper NAME... [--quick] [--out FOLDER]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.paper import frame, mtpc, ptp
from vllm_mtpc.cli import guard
from vllm_mtpc.engine.provenance import ROOT
from vllm_mtpc.errors import UsageError

TABLES = {**mtpc.TABLES, **ptp.TABLES}
DOCUMENTS = {ROOT / "benchmarks" / "PAPERS.md": frame.document, ROOT / "docs" / "papers.md": frame.summary}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks/paper/run.sh", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(TABLES)}, or all")
    parser.add_argument("--quick", action="store_true", help="a few steps, to try the path; needs --out")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write there instead of benchmarks/results")
    parser.add_argument(
        "--write", action="store_true", help="write the tables of benchmarks/PAPERS.md and docs/papers.md"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure the named tables, then write the document with --write."""
    names = [name for name, table in TABLES.items() if table.measure] if args.names == ["all"] else args.names
    for name in names:
        if name not in TABLES:
            raise UsageError(f"{name} is no table: allowed are {', '.join(TABLES)}, all; type one")
    if args.quick and args.out is None:
        raise UsageError("--quick without --out: its numbers say nothing and are not kept; name a folder with --out")
    if not names and not args.write:
        print("\n".join(f"{name:18} {table.title}" for name, table in TABLES.items()))
    for name in names:
        print(f"--- {name}: {TABLES[name].title}", flush=True)
        print(frame.run(name, TABLES[name], args.quick, args.out), flush=True)
    if args.write:
        for name, table in TABLES.items():
            if table.view and table.draw:
                table.draw(table.view(), frame.figure(name))
        for file, make in DOCUMENTS.items():
            file.write_text(make(TABLES, file.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The exit code; bad input is one line."""
    args = parser().parse_args(arguments)
    return guard("benchmarks/paper/run.sh", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
