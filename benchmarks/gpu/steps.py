"""What a step of a target of real size takes, verifying all drafts of a window: curves for `vllm-mtpc bench draft`.

    python -m benchmarks.gpu.steps --shape evabyte-6.5b --windows 8 16 --batch 1 8 64 --json FILE

Weights are random (benchmarks/synthetic.py); the head is the smallest, as its own time is taken off the step.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import synthetic
from vllm_mtpc.bench.decodings import arguments
from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.steps import measure
from vllm_mtpc.report import write_json

PROG = "python -m benchmarks.gpu.steps"
STEPS = 20  # of a cell


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--shape", required=True, help="of benchmarks.synthetic")
    add(
        "--windows", type=int, nargs="+", required=True, metavar="N", help="an engine each, which verifies N - 1 drafts"
    )
    add("--batch", type=int, nargs="+", required=True, metavar="B")
    add("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of every engine")
    add("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(words)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    import torch

    on_gpu = torch.cuda.is_available()
    found: dict[tuple[int, int], float] = {}
    for window in args.windows:
        folder = args.json.parent / f"{args.shape}-n{window}"
        made = ["--shape", args.shape, "--circuit", "ff", "--components", "1", "--window", str(window)]
        if code := synthetic.main([*made, "--out", str(folder)]):
            return code
        longest = 2 * (STEPS + 8) * window + 64
        engine = arguments(str(folder / "SYNTHETIC-target"), "auto", longest, max(args.batch), on_gpu, args.engine)
        engine |= {"load_format": "dummy", "speculative_config": speculative(folder / "SYNTHETIC-head", window)}
        wanted = [(batch, window - 1) for batch in args.batch]
        for cell in measure(engine, wanted, STEPS, 1.0, args.json.with_suffix(f".n{window}.log")):
            if cell["step_ms"] is not None:
                found[cell["batch"], cell["batch"] * (1 + cell["drafts"])] = cell["step_ms"]
    values = {"target": f"SYNTHETIC, {args.shape}", **provenance.collect()}
    write_json(args.json, {**values, "step_ms": [[*at, ms] for at, ms in sorted(found.items())], "draft_ms": {}})
    return 0 if found else 1  # no cell was measured


def speculative(head: Path, window: int) -> dict[str, Any]:
    given = {"method": "mtpc", "model": str(head), "num_speculative_tokens": window - 1}
    return given | {"num_speculative_tokens_per_batch_size": "off", "min_survival": 0}


if __name__ == "__main__":
    sys.exit(main())
