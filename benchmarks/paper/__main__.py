"""Tables and figures of the two papers: ``python -m benchmarks.paper [NAME] [--write]``."""

from __future__ import annotations

import argparse
import sys

from benchmarks.paper import frame, mtpc, ptp
from vllm_mtpc.cli import guard
from vllm_mtpc.engine.provenance import ROOT

TABLES = {**mtpc.TABLES, **ptp.TABLES}
MEASURED = [name for name, table in TABLES.items() if table.measure]
DOCUMENTS = {ROOT / "benchmarks" / "PAPERS.md": frame.document, ROOT / "docs" / "papers.md": frame.summary}


def run(args: argparse.Namespace) -> int:
    """Measure the named table, then write the documents with --write."""
    if args.name:
        print(frame.run(args.name, TABLES[args.name]))
    elif not args.write:
        print("\n".join(f"{name:18} {table.title}" for name, table in TABLES.items()))
    if args.write:
        for name, table in TABLES.items():
            if table.view and table.draw:
                table.draw([*table.view()], frame.figure(name))
        for file, make in DOCUMENTS.items():
            file.write_text(make(TABLES, file.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The exit code; bad input is one line."""
    parser = argparse.ArgumentParser(prog="benchmarks/paper/run.sh", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=MEASURED, help="a table to measure")
    documents = "write the tables of benchmarks/PAPERS.md and docs/papers.md"
    parser.add_argument("--write", action="store_true", help=documents)
    args = parser.parse_args(arguments)
    return guard(parser.prog, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
