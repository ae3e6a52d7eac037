"""Claims of the two papers: ``python -m benchmarks.paper [NAME] [--write]``."""

from __future__ import annotations

import argparse
import sys

from benchmarks.paper import frame, mtpc, ptp, ptp_text
from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.report import check_file, write_json

TABLES = {"mtpc": mtpc.TABLES, "ptp": ptp.TABLES}
MEASURED = {"ptp-ingredients-bytes": ptp_text.BYTES, "ptp-ingredients-smollm2": ptp_text.SMOLLM2}
DOCUMENTS = {
    provenance.ROOT / "benchmarks" / "PAPERS.md": frame.document,
    provenance.ROOT / "docs" / "papers.md": frame.summary,
}


def run(args: argparse.Namespace) -> int:
    """Measure the named heads, then write the documents with --write."""
    if args.name:
        check_file(file := provenance.RESULTS / f"paper-{args.name}.json")
        rows = list(ptp_text.measure(MEASURED[args.name]))
        write_json(file, {"title": args.name, **provenance.collect(), "rows": rows})
        print(file)
    if args.write:
        for page, make in DOCUMENTS.items():
            page.write_text(make(TABLES, page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code; bad input is one line."""
    parser = argparse.ArgumentParser(prog="benchmarks/paper/run.sh", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=MEASURED, help="PTP heads to train and measure")
    documents = "write the tables of benchmarks/PAPERS.md and docs/papers.md"
    parser.add_argument("--write", action="store_true", help=documents)
    args = parser.parse_args(arguments)
    return guard(parser.prog, lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
