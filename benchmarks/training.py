"""Throughput and peak memory of the trainer: `python -m benchmarks.training [--json FILE] [--quick]`.

Each row is an optimiser step of the trainer's own loss (`step_loss`), backward pass, clipping and AdamW included, on
random hidden states and tokens: the work of a step with given hidden states (`cache`). The target's forward
is not part of it. Each row has its own process, since the peak of resident memory is one number per process.

The n * r * V logits of a step exist for `chunk_windows` windows at a time; rows with all windows in one chunk show what
that saves. The two ways must give the same losses and gradient norm, or nothing is reported.

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
import math
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

TOLERANCE = 1e-4  # relative; sums of a thousand float32 terms in another order differ by about 1e-6
RESULT_MARK = "result: "
DEFINITIONS = (
    "window tokens/s: tokens x_1..x_n of all windows of a step, by the seconds of a step (median).",
    "text tokens/s: windows/s; one window starts at every token of the text.",
    "peak: the process's largest resident set on a CPU, torch's largest allocation on CUDA; expected: the formula.",
    "a step is loss, backward pass, gradient clipping and AdamW on given hidden states; the target does not run.",
)


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
    head: str = "linear"
    circuit: str = "btree"
    likelihood: bool = False  # of the text alone, in place of the trainer's own loss, which reads the target's
    steps: int = 2  # timed, after one that is not


# The demo; the same window and components as the paper's largest heads, at two hidden sizes; a subword vocabulary.
SHAPES = (
    Shape("demo", 257, 128, 8, 8, windows=2048, chunk=256),
    Shape("demo, likelihood", 257, 128, 8, 8, windows=2048, chunk=256, likelihood=True),
    Shape("bytes", 320, 1024, 16, 32, windows=1024, chunk=64),
    Shape("bytes, large target", 320, 4096, 16, 32, windows=256, chunk=64, steps=1),
    Shape("subwords", 32000, 1024, 8, 8, windows=128, chunk=16, head="shared", steps=1),
    Shape("subwords, likelihood", 32000, 1024, 8, 8, 128, 16, head="shared", likelihood=True, steps=1),
)
CHUNKED_ONLY = {"bytes, large target"}  # one piece adds nothing to the smaller shape
QUICK = (Shape("tiny", 61, 32, 4, 3, windows=96, chunk=32), Shape("tiny shared", 61, 32, 4, 3, 96, 32, head="shared"))


def ways(shape: Shape) -> list[Shape]:
    """A shape as it is measured: in chunks, and in one piece where both are wanted."""
    return [shape] if shape.name in CHUNKED_ONLY else [shape, replace(shape, chunk=shape.windows)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--quick", action="store_true", help="two tiny shapes: does it run, and do both ways agree")
    parser.add_argument("--shape", action="append", metavar="NAME", help="this shape only; repeatable")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA if there is one"
    )
    parser.add_argument("--child", metavar="SHAPE", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    return guard("python -m benchmarks.training", lambda: measure_shapes(args))


def measure_shapes(args: argparse.Namespace) -> int:
    if args.child:
        print(RESULT_MARK + json.dumps(measure(Shape(**json.loads(args.child)), args.device)))
        return 0
    check_file(args.json)
    shapes = chosen(QUICK if args.quick else SHAPES, args.shape)
    rows = [row for shape in shapes for row in measure_ways(shape, args.device)]
    from vllm_mtpc.engine.provenance import collect  # torch: not before, a child's peak starts at its parent's size

    result = {**collect(), "definitions": list(DEFINITIONS), "rows": rows}
    if args.json:
        write_json(args.json, result)
    _print(result)
    return 0


def chosen(shapes: Sequence[Shape], names: Sequence[str] | None) -> list[Shape]:
    """The shapes named, all without names. Raises UsageError for a name that is none."""
    unknown = set(names or ()) - {shape.name for shape in shapes}
    if unknown:
        allowed = ", ".join(shape.name for shape in shapes)
        raise UsageError(f"no shape {unknown.pop()!r}; allowed: {allowed}")
    return [shape for shape in shapes if not names or shape.name in names]


def measure_ways(shape: Shape, device: str) -> list[dict[str, Any]]:
    """Return one row per variant, each from its own process. Raises UsageError if a process fails or the ways
    disagree."""
    rows = []
    for way in ways(shape):
        print(f"{way.name}, chunks of {way.chunk} of {way.windows} windows ...", file=sys.stderr, flush=True)
        rows.append(run(way, device))
    check_agreement(shape.name, rows)
    return rows


def run(shape: Shape, device: str) -> dict[str, Any]:
    """Run `measure` in its own process."""
    call = [sys.executable, "-m", "benchmarks.training", "--device", device, "--child", json.dumps(asdict(shape))]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith(RESULT_MARK)]
    if done.returncode or not found:
        end = " / ".join(done.stderr.strip().splitlines()[-3:]) or "no message; the system may have run out of memory"
        raise UsageError(f"{shape.name}: its process ended with exit code {done.returncode}: {end}")
    return json.loads(found[-1].removeprefix(RESULT_MARK))


def check_agreement(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Raises UsageError unless all rows have the same losses and gradient norm, up to rounding, and finite ones."""
    for key in ("losses", "gradient_norms"):
        first, *others = [row[key] for row in rows]
        close = all(math.isclose(a, b, rel_tol=TOLERANCE) for row in others for a, b in zip(first, row, strict=True))
        if not close or not all(math.isfinite(value) for row in rows for value in row[key]):
            found = "; ".join(f"chunks of {row['shape']['chunk']}: {row[key]}" for row in rows)
            raise UsageError(
                f"{name}: {key} differ between the ways or are not finite, so nothing is reported ({found})"
            )


def measure(shape: Shape, device_name: str = "auto") -> dict[str, Any]:
    """Build the head and take steps; returns a row: the shape, seconds, memory in bytes, losses (nats)."""
    import torch

    from vllm_mtpc.train.trainer import peak_memory_bytes

    name = ("cuda" if torch.cuda.is_available() else "cpu") if device_name == "auto" else device_name
    device = torch.device(name)
    Job(
        replace(shape, vocab_size=7, hidden_size=8, components=min(2, shape.components), windows=4, chunk=2), device
    ).step()
    base = peak_memory_bytes(device)  # torch loads more of itself in a first backward pass and optimiser step
    job = Job(shape, device)
    seconds, losses, norms = [], [], []
    for _ in range(1 + shape.steps):
        started = time.perf_counter()
        loss, norm = job.step()
        losses.append(loss)  # read from the device, which waits for it
        norms.append(norm)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[1:])
    return {
        "shape": asdict(shape),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "parameters": job.parameters,
        "seconds": [round(value, 4) for value in seconds[1:]],
        "window_tokens_per_second": round(shape.windows * shape.window / median, 1),
        "text_tokens_per_second": round(shape.windows / median, 1),
        "base_bytes": base,
        "peak_bytes": peak_memory_bytes(device),
        "expected_bytes": base + expected_bytes(shape, job.parameters, job.frozen),
        "losses": losses,
        "gradient_norms": norms,
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
        from vllm_mtpc.heads import build_head
        from vllm_mtpc.train.options import parse
        from vllm_mtpc.train.trainer import BETAS

        self.shape = shape
        r, n, sizes = shape.components, shape.window, {"vocab_size": shape.vocab_size, "hidden_size": shape.hidden_size}
        changes = {"circuit": shape.circuit, "window": n, "components": r, "head": shape.head}
        changes |= {"chunk_windows": shape.chunk, **({"beta": 0.0, "acceptance": 0.0} if shape.likelihood else {})}
        self.options = parse({"target": "random", "data": ["random"], "out": "none", **changes})
        config = HeadConfig.create(
            circuit=shape.circuit, window=n, num_components=r, target=sizes, verifier="random", head=shape.head
        )
        torch.manual_seed(0)
        with torch.device(device):
            self.head = build_head(config)
            self.hidden = torch.randn(shape.windows, shape.hidden_size)
            self.tokens = torch.randint(0, shape.vocab_size, (shape.windows, n))
            needs = self.head.needs_lm_head or self.options.needs_distribution
            self.lm_head = torch.randn(shape.vocab_size, shape.hidden_size) * 0.02 if needs else None
        if self.head.needs_lm_head:
            self.head.bind_lm_head(self._logits)
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

    def step(self) -> tuple[float, float]:
        """One optimiser step; its loss and the norm of its gradient."""
        import torch

        from vllm_mtpc.train.losses import step_loss
        from vllm_mtpc.train.trainer import MAX_NORM

        counts = torch.full((self.shape.window,), self.shape.windows, device=self.tokens.device)
        loss = step_loss(self.head, self.hidden.__getitem__, self.tokens, counts, self._log_p, self.options)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()


def _print(result: dict[str, Any]) -> None:
    hardware, rows = result["hardware"], result["rows"]
    header = ["shape", "head", "V", "D", "n", "r", "parameters", "windows", "chunk", "window tok/s", "text tok/s"]
    lines = []
    for row in rows:
        shape = Shape(**row["shape"])
        sizes = (shape.vocab_size, shape.hidden_size, shape.window, shape.components)
        lines.append(
            [
                *(shape.name, shape.head, *map(str, sizes), f"{row['parameters'] / 1e6:.1f}M"),
                *(str(shape.windows), str(shape.chunk)),
                *(f"{row[f'{what}_tokens_per_second']:,.0f}" for what in ("window", "text")),
                *(f"{row[key] / 2**30:.2f}" for key in ("peak_bytes", "expected_bytes")),
            ]
        )
    machine = ", ".join(hardware["gpus"]) or hardware["cpu"]
    title = f"{machine}, {rows[0]['threads']} CPU threads"
    print_table(title, [*header, "peak GiB", "expected GiB"], lines)
    print("\n".join(["", *result["definitions"]]))


if __name__ == "__main__":
    sys.exit(main())
