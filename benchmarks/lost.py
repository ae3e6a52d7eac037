"""Where first drafts are lost: ``python -m benchmarks.lost HEAD TARGET FOLDER --json FILE``.

FOLDER is of ``python -m benchmarks.own_text``: texts that the target wrote at T=1 and T=0, with its states. The steps
of serving along them are divided by the entropy of the target's distribution (of T=1) of the drafted token.
"""

from __future__ import annotations

import argparse
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.grid import read_texts, samples_of
from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.eval.circuit_evaluator import collect
from vllm_mtpc.eval.evaluator import attach, ratio, step_starts
from vllm_mtpc.eval.text import Samples, Sampling
from vllm_mtpc.heads.head import Head
from vllm_mtpc.hf import Target, load_target
from vllm_mtpc.report import print_table, write_json

PROG = "python -m benchmarks.lost"
BITS = (0.0, 0.5, 2.0, 4.0, math.inf)  # of entropy


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("head", type=Path, metavar="HEAD")
    parser.add_argument("target", metavar="TARGET", help="folder or hub name")
    parser.add_argument("text", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(arguments)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    target = load_target(args.target, torch.float32)
    head: Head = attach(args.head, target).head  # type: ignore[attr-defined]
    texts, rows = read_texts(args.text, target.hidden_size), list[dict[str, Any]]()
    for temperature in (1.0, 0.0):
        samples = samples_of([text for text in texts if text.temperature == temperature], target, ())
        contexts = collect(head, target, samples, Sampling(temperature))
        first, count = samples.starts(head.circuit.window - 1)
        bits = torch.zeros(contexts.valid.shape, dtype=torch.float64)
        for row, (start, size) in enumerate(zip(first.tolist(), count.tolist(), strict=True)):
            bits[row, :size] = entropy(target, samples, row, start + 1, size)
        steps = step_starts(contexts.text, contexts.valid)
        for least, most in pairwise(BITS):
            own = steps * ((bits >= least) & (bits < most))
            accepted, error = ratio((own * contexts.overlap[..., 0]).sum(1), own.sum(1))
            coverage = (own * contexts.covered).sum() / own.sum()
            share = own.sum() / steps.sum()
            rows.append({"temperature": temperature, "bits": least, "share": share.item(), "accepted": accepted})
            rows[-1] |= {"standard_error": error, "coverage": coverage.item()}
    print_table(str(args.head), tuple(rows[0]), [[f"{value:.3f}" for value in row.values()] for row in rows])
    write_json(args.json, {**provenance.collect(), "texts": len(texts), "rows": rows})
    return 0


@torch.inference_mode()
def entropy(target: Target, samples: Samples, row: int, start: int, size: int) -> Tensor:
    """Return the bits [size] of the distributions of the tokens after a text's tokens start, start + 1, ..."""
    log_p = target.logits(samples.hidden[row, start : start + size]).float().log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).double() / math.log(2)


if __name__ == "__main__":
    sys.exit(main())
