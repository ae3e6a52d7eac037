"""Rehearses engines; exit status 1 if one does not start or this package does what no GPU should see."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DISABLE_PYNCCL": "1",
    "HF_HUB_OFFLINE": "1",
}
# torch.compile without inductor: vLLM's backend splits the traced graph, whose pieces run as they are.
COMPILED = {
    "compilation_config": {
        "mode": 3,
        "backend": "eager",
        "custom_ops": ["none"],
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
    }
}


def rehearse(made: Any, args: argparse.Namespace) -> int:
    """Rehearse in a fork, print and write the reports; return the exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    engine = {"dtype": "bfloat16", "max_num_seqs": 6} | (COMPILED if args.compile else {}) | args.engine
    if args.ranks > 1:
        engine["tensor_parallel_size"] = args.ranks
    reports = made.run(engine, args.spec, has_faults=made.report.head == args.faults)
    for report in reports:
        name = Path(report.head).name
        if args.json:
            args.json.mkdir(parents=True, exist_ok=True)
            (args.json / f"{name}.json").write_text(json.dumps(vars(report), indent=1))
        for one in sorted(report.findings, key=lambda one: (not one["ours"], one["kind"])):
            if one["matters"]:
                shown = (str(one[key]) for key in ("phase", "kind", "count", "what", "where"))
                print("* " if one["ours"] else "  ", "  ".join(shown), sep="")
        drafts = sorted({(one["num_reqs"], "+" * one["has_prompt"], one["operations"]) for one in report.drafts})
        shown = ", ".join(f"{reqs}{more}: {count}" for reqs, more, count in drafts)
        print(f"GPU operations of drafts outside of graphs, by requests (+: with prompts): {shown}")
        print(f"{name}: {report.error or 'done'}", flush=True)
    os._exit(bool(reports[0].error or reports[0].serious))  # vLLM's threads do not end by themselves


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_rehearsal", description=__doc__)
    parser.add_argument("heads", nargs="+", metavar="HEAD", help="'plain', a packaged head's name, or a head's folder")
    parser.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks, of which the first is rehearsed")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="arguments of the engine")
    parser.add_argument("--spec", type=json.loads, default={}, metavar="JSON", help="keys of speculative_config")
    parser.add_argument("--compile", action="store_true", help="trace the target with Dynamo, in vLLM's pieces")
    parser.add_argument("--faults", metavar="HEAD", help="repeat the steps of this head with the faults of faults.py")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write a report for each head")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT, CUDA_VISIBLE_DEVICES=",".join(map(str, range(args.ranks))))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

    from tests.gpu_rehearsal.rehearsal import Rehearsal

    make = Rehearsal.replace_modules()
    sys.exit(max(rehearse(make(head), args) for head in args.heads))


if __name__ == "__main__":
    main()
