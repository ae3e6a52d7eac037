"""Throughput and peak memory of the trainer: `python -m benchmarks.training [--json FILE]`.

Each row is an optimiser step of the trainer's own loss (`step_loss`), backward pass, clipping and AdamW included, on
random hidden states and tokens: the work of a step with given hidden states (`cache`). The target's forward
is not part of it. Each row has its own process, since the peak of resident memory is one number per process.

The n * r * V logits of a step exist for `chunk_windows` windows at a time; rows with all windows in one chunk show what
that saves.

Expected memory in bytes, float32:  base + 12 P + 4 F + 4 B D + s + max(8 P, m L)
  base  the process after a step of next to no size: interpreter, libraries (on CUDA cuBLAS's buffer)
  P, F  parameters learnt (12: weights and two moments of AdamW), and of a frozen lm_head that is borrowed
  B D   hidden states of the step's B windows
  s     4 P with several chunks, the gradient summed so far; else 0
  8 P   the gradient of a chunk, twice: autograd puts it in the place of a slice, and adds out of place
  m L   a chunk's logits, L = 4 n r V chunk bytes: m = 3 (logits, log-softmax and a gradient); 4 + 1/r with a loss that
        reads the target's distribution, which is included
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vllm_mtpc.cli import guard
from vllm_mtpc.errors import UsageError
from vllm_mtpc.report import check_file, print_table, write_json

PROG = "python -m benchmarks.training"
DEFINITIONS = (
    "window tokens/s: tokens x_1..x_n of all windows of a step, by the seconds of a step (median).",
    "peak: the process's largest resident set on a CPU, torch's largest allocation on CUDA; expected: the formula.",
    "a step is loss, backward pass, gradient clipping and AdamW on given hidden states; the target does not run.",
)
HEADER = ("shape", "chunk", "parameters", "window tokens/s", "peak GiB", "expected GiB")


@dataclass(frozen=True)
class Shape:
    """Shape of the head and size of a step."""

    name: str
    vocab_size: int
    hidden_size: int
    window: int
    components: int
    windows: int  # B, of one optimiser step
    chunk: int  # windows whose logits exist at once; `windows`: all of them
    leaves: str = "own"  # the trunk is none
    circuit: str = "btree"
    likelihood: bool = False  # of the text alone, in place of the trainer's own loss, which reads the target's
    steps: int = 2  # timed, after one that is not


# The demo; the same window and components as the paper's largest heads, at two hidden sizes; a subword vocabulary.
CHUNKED = (
    Shape("demo", 257, 128, 8, 8, windows=2048, chunk=256),
    Shape("demo, likelihood", 257, 128, 8, 8, windows=2048, chunk=256, likelihood=True),
    Shape("bytes", 320, 1024, 16, 32, windows=1024, chunk=64),
    Shape("subwords", 32000, 1024, 8, 8, windows=128, chunk=16, leaves="lm_head", steps=1),
    Shape("subwords, likelihood", 32000, 1024, 8, 8, 128, 16, leaves="lm_head", likelihood=True, steps=1),
)
SHAPES = (
    *(way for shape in CHUNKED for way in (shape, replace(shape, chunk=shape.windows))),
    Shape("bytes, large target", 320, 4096, 16, 32, windows=256, chunk=64, steps=1),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--child", metavar="SHAPE", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Measure every shape in a process of its own."""
    if args.child:
        print(json.dumps(measure(Shape(**json.loads(args.child)))))
        return 0
    check_file(args.json)
    rows = []
    for shape in SHAPES:
        print(f"{shape.name}, chunks of {shape.chunk} of {shape.windows} windows ...", file=sys.stderr, flush=True)
        call = [sys.executable, "-m", "benchmarks.training", "--child", json.dumps(asdict(shape))]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        if done.returncode:
            end = done.stderr.strip().rpartition("\n")[2] or "no message; the system may have run out of memory"
            raise UsageError(f"{shape.name}: its process ended with exit code {done.returncode}: {end}")
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    from vllm_mtpc.engine.provenance import collect  # torch: not before, a child's peak starts at its parent's size

    print_table("optimiser steps of the trainer", HEADER, [line(row) for row in rows])
    print("\n".join(["", *DEFINITIONS]))
    if args.json:
        write_json(args.json, {**collect(), "definitions": DEFINITIONS, "rows": rows})
    return 0


def line(row: dict[str, Any]) -> list[str]:
    """Format a row of the table."""
    sizes = [row["shape"]["name"], str(row["shape"]["chunk"]), f"{row['parameters'] / 1e6:.1f}M"]
    gib = [f"{row[key] / 2**30:.2f}" for key in ("peak_bytes", "expected_bytes")]
    return [*sizes, f"{row['window_tokens_per_second']:,.0f}", *gib]


def measure(shape: Shape) -> dict[str, Any]:
    """Build the head and take steps; return the shape, seconds, memory in bytes, losses (nats)."""
    import torch

    from vllm_mtpc.train.trainer import peak_memory_bytes

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = {"vocab_size": 7, "hidden_size": 8, "components": min(2, shape.components), "windows": 4, "chunk": 2}
    Job(replace(shape, **small), device).step()
    base = peak_memory_bytes(device)  # torch loads more of itself in a first backward pass and optimiser step
    job = Job(shape, device)
    seconds, losses = [], []
    for _ in range(1 + shape.steps):
        started = time.perf_counter()
        losses.append(job.step())  # read from the device, which waits for it
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[1:])
    return {
        "shape": asdict(shape),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "parameters": job.parameters,
        "seconds": [round(value, 4) for value in seconds[1:]],
        "window_tokens_per_second": round(shape.windows * shape.window / median, 1),
        "base_bytes": base,
        "peak_bytes": peak_memory_bytes(device),
        "expected_bytes": base + expected_bytes(shape, job.parameters, job.frozen),
        "losses": losses,
    }


def expected_bytes(shape: Shape, parameters: int, frozen: int = 0) -> int:
    """The formula at the top of this file, less its base."""
    logits = 4 * shape.window * shape.components * shape.vocab_size * min(shape.chunk, shape.windows)
    copies = 3 if shape.likelihood else 4 + 1 / shape.components
    summed = 4 * parameters if shape.chunk < shape.windows else 0
    kept = 12 * parameters + 4 * frozen + 4 * shape.windows * shape.hidden_size
    return kept + summed + max(8 * parameters, round(copies * logits))


class Job:
    """A head, an optimiser and the windows of one step, made from a fixed seed."""

    def __init__(self, shape: Shape, device: Any) -> None:
        import torch

        from vllm_mtpc.config.mtpc_config import HeadConfig
        from vllm_mtpc.heads.head import build_head
        from vllm_mtpc.train.options import parse
        from vllm_mtpc.train.trainer import BETAS

        self.shape = shape
        r, n, sizes = shape.components, shape.window, {"vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size}
        parts = {"trunk": {"kind": "none"}, "leaves": {"kind": shape.leaves}}
        changes = {"circuit": shape.circuit, "window": n, "components": r, **parts}
        changes |= {"chunk_windows": shape.chunk, **({"beta": 0.0, "acceptance": 0.0} if shape.likelihood else {})}
        self.options = parse({"target": "random", "data": ["random"], "out": "none", **changes})
        given = {"circuit": shape.circuit, "window": n, "num_components": r, **parts}
        config = HeadConfig.create(**given, target=sizes, verifier="random")
        torch.manual_seed(0)
        with torch.device(device):
            self.head = build_head(config)
            self.hidden = torch.randn(shape.windows, shape.hidden_size)
            self.tokens = torch.randint(0, shape.vocab_size, (shape.windows, n))
            needs = self.head.leaves.needs_lm_head or self.options.needs_distribution
            self.lm_head = torch.randn(shape.vocab_size, shape.hidden_size) * 0.02 if needs else None
        if self.head.leaves.needs_lm_head:
            self.head.leaves.bind_lm_head(self._logits)
        self.parameters = sum(parameter.numel() for parameter in self.head.parameters())
        self.frozen = 0 if self.lm_head is None else self.lm_head.numel()
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=3e-4, betas=BETAS, weight_decay=0.0, fused=True)

    def _logits(self, hidden: Any) -> Any:
        return hidden @ self.lm_head.T

    def _log_p(self, piece: slice) -> Any:
        """A target's log p [., n, V]: at the same states as the head's, since others would only differ in value."""
        import torch

        with torch.no_grad():
            states = self.hidden[piece, None].expand(-1, self.shape.window, -1)
            return self._logits(states).log_softmax(-1)

    def step(self) -> float:
        """Take one optimiser step and return its loss."""
        import torch

        from vllm_mtpc.train.losses import step_loss
        from vllm_mtpc.train.trainer import MAX_NORM

        counts = torch.full((self.shape.window,), self.shape.windows, device=self.tokens.device)
        loss = step_loss(self.head, self.hidden.__getitem__, self.tokens, counts, self._log_p, self.options)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


if __name__ == "__main__":
    sys.exit(main())
