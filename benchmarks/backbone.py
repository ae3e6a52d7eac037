"""Circuits on one frozen backbone: ``python -m benchmarks.backbone DRAFTER --data DATA... --json FILE``.

DRAFTER is a head `backbone` with circuit ff (benchmarks/backbone-drafter.yaml trains the demo's). Its states of
the windows and of the held-out texts are computed once; every circuit then learns from the same states, windows and
steps, as `vllm-mtpc train --init-from DRAFTER --freeze-backbone`, without running the layers in every step.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from benchmarks import timing
from benchmarks.draft import DEFINITIONS as OF_DRAFTS
from benchmarks.draft import Case, parts
from vllm_mtpc.checkpoint import load_head, resolve_head
from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.counters import DEFINITIONS
from vllm_mtpc.eval.acceptance import measure
from vllm_mtpc.eval.text import with_backbone
from vllm_mtpc.hf import bind
from vllm_mtpc.report import check_file, print_table, write_json
from vllm_mtpc.train.losses import step_loss
from vllm_mtpc.train.options import TrainOptions, parse
from vllm_mtpc.train.run import read_data, read_target
from vllm_mtpc.train.trainer import BETAS, MAX_NORM, held_out_prompts, learning_rate

CIRCUITS = ("ff", "cp", "hmm", "btree")
TOKEN_RANK = 32


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backbone", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("drafter", metavar="DRAFTER", help="head folder: head backbone, circuit ff")
    add("--target", required=True, metavar="MODEL")
    add("--data", required=True, nargs="+", metavar="DATA", help="as for train: the target's own text")
    add("--validation-data", required=True, nargs="+", metavar="DATA")
    add("--components", type=int, default=8, metavar="R")
    add("--component-rank", type=int, default=32, metavar="R_C")
    add("--steps", type=int, default=300, metavar="N")
    add("--windows", type=int, default=256, metavar="W", help="of a step")
    add("--passes", type=int, default=2, metavar="P", help="over the windows")
    add("--sequences", type=int, default=64, metavar="S", help="held-out texts per temperature")
    add("--json", type=Path, metavar="FILE")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The exit code; bad input is one line."""
    args = parser().parse_args(arguments)
    return guard("python -m benchmarks.backbone", lambda: run(args))


def options_of(args: argparse.Namespace, circuit: str, token_rank: int, window: int) -> TrainOptions:
    """The provenance of the run of a row."""
    values = {
        "target": args.target, "data": args.data, "validation_data": args.validation_data, "out": "none",
        "head": "backbone", "init_from": args.drafter, "circuit": circuit, "window": window, "token_rank": token_rank,
        "windows_per_step": args.windows, "max_steps": args.steps, "seq_len": 160, "learning_rate": 0.005,
        "evaluation_sequences": args.sequences, "block_rows": 48,
    }  # fmt: skip
    if circuit != "ff":
        values |= {"components": args.components, "component_rank": args.component_rank}
    return parse(values, "benchmarks.backbone")


def run(args: argparse.Namespace) -> int:
    """Trains every circuit on the same states, and prints the table."""
    check_file(args.json)
    window = load_head(resolve_head(args.drafter))[0].window
    options = options_of(args, "ff", 0, window)
    target = read_target(options, torch.device("cpu"))
    rows, _, held_out = read_data(options, target, print)
    job = options.trainer(options, target, Accelerator(cpu=True))
    prompts = held_out_prompts(options, target, held_out)
    with torch.no_grad():
        steps = list(islice(states_of(job, rows), max(1, args.steps // args.passes)))
    texts = {name: with_backbone(some, job.head, target) for name, some in job.continuations(prompts).items()}
    results = []
    for circuit in CIRCUITS:
        for token_rank in (0, TOKEN_RANK):
            options = options_of(args, circuit, token_rank, window)
            job, started = options.trainer(options, target), time.monotonic()
            trained = learn(job.head, steps, options) if circuit != "ff" or token_rank else 0
            results.append(
                {
                    "circuit": circuit,
                    "components": options.num_components,
                    "token_rank": token_rank,
                    "steps": trained,
                    "parameters": sum(v.numel() for name, v in job.head.named_parameters() if "backbone." not in name),
                    "seconds": round(time.monotonic() - started, 1),
                    **{name: measured(job, target, some, name) for name, some in texts.items()},
                    "draft_ms": draft_ms(job.head),
                }
            )
            print(row(results[-1]), flush=True)
    title = f"Circuits on a frozen backbone, n={window}, {args.steps} steps of {args.windows} windows"
    columns = ["circuit", "r", "token_rank", "parameters", "T=1", "T=0", "draft ms"]
    print_table(title, columns, [row(one) for one in results])
    if args.json:
        definitions = [*DEFINITIONS.splitlines(), *OF_DRAFTS]
        values = {"title": title, "definitions": definitions, **provenance.collect(), "rows": results}
        write_json(args.json, values)
    return 0


def states_of(job: Any, rows: Any) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Of each step: states [B, n, D] of the backbone, tokens [B, n], counts [n], the target's log p_k [B, n, V]."""
    job.setup(rows)
    whole = slice(None)
    for batch in job.windows.batches():
        read, tokens, counts, log_p = job.model.read(batch)
        yield read(whole), tokens, counts, log_p(whole)


def learn(head: Any, steps: list[tuple[Tensor, ...]], options: TrainOptions) -> int:
    """Trains all of a head but its backbone; returns the number of steps."""
    if hasattr(head, "backbone"):
        head.backbone.requires_grad_(False)
    learnt = [value for value in head.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=options.learning_rate, betas=BETAS, weight_decay=0.0)
    for step in range(options.max_steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, step, options.max_steps)
        states, tokens, counts, log_p = steps[step % len(steps)]
        loss = step_loss(head, states.__getitem__, tokens, counts, log_p.__getitem__, options)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return options.max_steps


def measured(job: Any, target: Any, samples: Any, name: str) -> dict[str, Any]:
    """Expected tokens/step on held-out texts of one temperature."""
    bind(job.head, target)
    found = measure(job.head, target, samples, job.samplings()[name])
    return {key: getattr(found, key) for key in ("tokens_per_step", "standard_error", "per_position")}


@torch.inference_mode()
def draft_ms(head: Any) -> timing.Time:
    """Milliseconds of a draft at T=1 for one request, as of `benchmarks.draft`."""
    *_, draft = parts(Case("", head, head.circuit.window - 1), 1, 1.0)
    return timing.measure(draft, torch.device("cpu"), 50)


def row(one: dict[str, Any]) -> list[str]:
    """A line of the table."""
    shown = [f"{one[name]['tokens_per_step']:.3f} ± {one[name]['standard_error']:.3f}" for name in ("t1", "t0")]
    sizes = [str(one["components"]), str(one["token_rank"]), f"{one['parameters']:,}"]
    return [one["circuit"], *sizes, *shown, f"{one['draft_ms'].median:.2f}"]


if __name__ == "__main__":
    sys.exit(main())
