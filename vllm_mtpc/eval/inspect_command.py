"""`vllm-mtpc inspect`: describe a head, and compute the memory for serving it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from vllm_mtpc.checkpoint.inspect import Report, inspect_head, rows_of
from vllm_mtpc.errors import printable
from vllm_mtpc.flags import check_positive

MAX_CELL = 500  # characters of a row of the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="PATH", help="head folder, target folder that bundles mtpc/, or hub name")
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--max-num-seqs", type=int, metavar="N", help="print the GPU memory that serving the head to N requests takes")
    add("--tensor-parallel-size", type=int, default=1, metavar="T", help="with --max-num-seqs: GPUs (default: 1)")


def run(args: argparse.Namespace) -> int:
    check_positive(args, "max_num_seqs", "tensor_parallel_size")
    report = inspect_head(args.path)
    if args.max_num_seqs is not None:
        report["memory"] = served_memory(Path(report["path"]), args.max_num_seqs, args.tensor_parallel_size)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_table(report)
    return 0


def served_memory(folder: Path, max_num_seqs: int, num_ranks: int) -> Report:
    """Return MiB on each GPU of Model Runner V2: target in bfloat16, head_dtype auto, default schedule of drafts.

    Raises CheckpointError for a PTP head, whose rows are the target's own.
    """
    import torch

    from vllm_mtpc.checkpoint.load import read_circuit_config
    from vllm_mtpc.plan.draft_schedule import expand_schedule, gpu_schedule
    from vllm_mtpc.proposers.config.draft_memory import draft_memory

    config = read_circuit_config(folder)
    drafts, is_drawn = config.num_speculative_tokens, config.draft_sample_method == "probabilistic"
    schedule = expand_schedule(gpu_schedule(drafts), max_num_seqs, drafts)
    found = draft_memory(config, schedule, drafts, torch.bfloat16, num_ranks, is_drawn=is_drawn)
    sizes = {f"{name}_mib": round(size / 2**20, 1) for name, size in found._asdict().items()}
    return {"max_num_seqs": max_num_seqs, "tensor_parallel_size": num_ranks, **sizes}


def _print_table(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    from vllm_mtpc.report import console

    out = console()

    def plain(text: str) -> Text:
        """Remove markup, control characters and line ends: the file is not trusted."""
        shown = printable(text, MAX_CELL)
        return Text(shown.encode(out.encoding, "backslashreplace").decode(out.encoding), overflow="fold")

    table = Table(title=plain(report["path"]), title_justify="left", show_header=False)
    table.add_column(no_wrap=False, style="bold")
    for row in rows_of(report):
        table.add_row(*map(plain, row))
    out.print(table)
    out.print(plain(f"weights: ok ({len(report['weights']['tensors'])} tensors, shapes as configured, all finite)"))
