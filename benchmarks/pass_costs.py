"""PTP in one pass of the target or in two, by arithmetic: ``python -m benchmarks.pass_costs --json FILE``.

Nothing here is measured on a GPU. A pass takes the longer of its bytes at 3.35 TB/s and its FLOPs at 800 TFLOP/s (an
H100, bfloat16), plus its launches, 2.5 us each; outside of a CUDA graph the host needs 8 us for each, and the pass the
longer of the two times. Requests have 1,000 tokens in the KV cache. Two passes are captured; the merged pass runs
eagerly, `captured` is what it would take in a graph.

Tokens per step: of the packaged `late`, measured by its trainer, and of drafts that are right with a chance of 0.78
each, about the paper's O-PTP (4.2). The merged pass has the groups that `vllm_mtpc.heads.ptp.row_groups` chooses.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from vllm_mtpc import demo
from vllm_mtpc.checkpoint import read_config
from vllm_mtpc.engine import provenance
from vllm_mtpc.heads.ptp.row_groups import Chain, plan_groups
from vllm_mtpc.report import write_json

BANDWIDTH, FLOPS, CAPTURED_S, EAGER_S = 3.35e12, 8e14, 2.5e-6, 8e-6
CONTEXT, DRAFTS, AUX_ROWS = 1000, 7, 256
PLAIN_LAUNCHES, STUDENT_LAUNCHES = 10, 33  # of a layer: assumed, and counted with adapters and groups


class Target(NamedTuple):
    """Sizes of a target in bfloat16."""

    parameters: float
    layers: int
    kv_bytes: int  # of a token


TARGETS = {"1B": Target(1.24e9, 16, 32_768), "8B": Target(8.2e9, 36, 147_456)}


def seconds(target: Target, batch: int, rows: int, launches: int, captured: bool = True) -> float:
    """Return the time of one pass over `rows` rows of `batch` requests."""
    work = max(2 * target.parameters / BANDWIDTH, 2 * target.parameters * rows / FLOPS)
    work += batch * CONTEXT * target.kv_bytes / BANDWIDTH
    count = launches * target.layers
    return max(work + count * CAPTURED_S, 0 if captured else count * EAGER_S)


def row_of(name: str, target: Target, batch: int, chances: str, accepted: list[float]) -> dict[str, Any]:
    """Return times and tokens per step at one batch size."""
    head = SimpleNamespace(first_row=1, window=DRAFTS + 1, accepted=accepted)
    drafts = [DRAFTS] * batch
    plain = seconds(target, batch, batch, PLAIN_LAUNCHES)
    verify = seconds(target, batch, batch * (1 + DRAFTS), PLAIN_LAUNCHES)
    two = verify + seconds(target, batch, batch * DRAFTS, STUDENT_LAUNCHES)
    right = [sum(accepted[g:]) for g in range(len(accepted))]  # P(at least g)
    sizes = plan_groups(head, drafts, two_pass=False, max_aux_rows=AUX_ROWS).sizes[batch - 1]
    chain, rows = Chain(accepted, DRAFTS, sum(sizes), head.first_row), batch * (1 + DRAFTS + sum(sizes))
    merged = [seconds(target, batch, rows, STUDENT_LAUNCHES, captured) for captured in (False, True)]
    tokens = {"two_pass": 2 + sum(right[1:DRAFTS]), "merged": chain.tokens_per_step(np.array(sizes))}
    speeds = (tokens["two_pass"] / two, *(tokens["merged"] / one for one in merged))
    return {
        "target": name, "batch": batch, "accepted": chances, "rows": rows, "plain_ms": 1e3 * plain,
        "two_pass_ms": 1e3 * two, "merged_ms": 1e3 * merged[0], "captured_ms": 1e3 * merged[1],
        "two_pass_tokens": tokens["two_pass"], "merged_tokens": tokens["merged"],
        **dict(zip(("two_pass", "merged", "captured"), (speed * plain for speed in speeds), strict=True)),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    late, p = read_config(demo.path("late")), 0.78
    chances = {"late": late.accepted, "0.78 each": [*((1 - p) * p**g for g in range(DRAFTS)), p**DRAFTS]}
    rows = [
        row_of(name, target, batch, *one) for one in chances.items() for name, target in TARGETS.items()
        for batch in (1, 8, 32)
    ]  # fmt: skip
    for row in rows:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
    if args.json:
        write_json(args.json, {"kind": "pass costs", **provenance.collect(), "rows": rows})


if __name__ == "__main__":
    main()
