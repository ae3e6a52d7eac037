"""Kernels against their definitions and eager chains on a GPU: ``python -m benchmarks.kernels --json FILE``.

Each case first compares the kernel's result with its definition in PyTorch (`naive.py`); a difference ends the run with
exit code 1. Without a GPU the definitions alone are timed: an interpreted kernel has no speed. `benchmarks.draft` times
the draft kernels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import timing
from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.errors import MtpcError
from vllm_mtpc.report import check_file, print_table, write_json

PROG = "python -m benchmarks.kernels"
Call = Callable[[], Any]
BYTES, SUBWORDS = 320, 32000  # vocabularies
CLOSE = 1e-3  # of float32 sums in another order, bfloat16 products in the case of the leaves
DEFINITIONS = (
    "naive: the definition in PyTorch; eager: PyTorch's own operations without a kernel (- where that is naive).",
    "MiB: bytes that must be read and written; floor ms: these bytes at the bandwidth of a large copy. Medians.",
)
HEADER = ("operation", "sizes", "kernel ms", "naive ms", "eager ms", "MiB", "floor ms")


class Case(NamedTuple):
    """One size of an operation."""

    sizes: str
    naive: Call
    moved: int  # bytes that must be read and written
    kernel: Call | None = None  # None: no GPU
    eager: Call | None = None


def size_of(*tensors: Tensor) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def make_case(name: str, sizes: str, given: tuple[Any, ...], written: int, eager: Callable | None = None) -> Case:
    """Return the case of FOLDER.FUNCTION of `kernels/`, which kernel and definition call alike.

    Args:
        name: FOLDER.FUNCTION.
        sizes: as shown.
        given: arguments; every tensor is read.
        written: bytes written.
        eager: takes the same arguments.
    """
    folder, _, function = name.partition(".")
    tensors = [value for value in given if isinstance(value, Tensor)]

    def call_of(module: str) -> Call:
        return partial(getattr(import_module(f"vllm_mtpc.kernels.{folder}.{module}"), function), *given)

    kernel = call_of("kernel") if tensors[0].is_cuda else None
    return Case(sizes, call_of("naive"), size_of(*tensors) + written, kernel, eager and partial(eager, *given))


def uniform(device: torch.device) -> Iterator[Case]:
    for count in (64, 4096):
        seed, pos = (torch.randint(2**20, (count,), device=device) for _ in range(2))
        eager = lambda seed, pos: torch.rand(len(seed), device=device)  # noqa: E731
        yield make_case("uniform.uniform", f"T={count}", (seed, pos), 4 * count, eager)


def pick(device: torch.device) -> Iterator[Case]:
    def eager(logits: Tensor, u: Tensor) -> Tensor:
        return torch.searchsorted(logits.softmax(dim=-1).cumsum(dim=-1), u[:, None], right=True)

    for rows, vocab_size in ((16, BYTES), (512, BYTES), (16, SUBWORDS), (512, SUBWORDS)):
        logits, u = torch.randn(rows, vocab_size, device=device) * 3, torch.rand(rows, device=device)
        yield make_case("pick.pick", f"T={rows} V={vocab_size}", (logits, u), 8 * rows, eager)


def couple(device: torch.device) -> Iterator[Case]:
    for requests in (1, 64):
        width = 8
        tokens, drafts = torch.randint(2, (2, requests * width), device=device)  # half of the drafts are accepted
        begins = torch.arange(requests + 1, dtype=torch.int32, device=device) * width
        given, written = (tokens, drafts, begins, width), size_of(tokens) + 4 * requests
        yield make_case("couple.accept", f"R={requests} K={width - 1}", given, written)


OPERATIONS = {"uniform": uniform, "pick": pick, "couple": couple}


def main(words: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    add = parser.add_argument
    add(
        "--only", nargs="+", choices=sorted(OPERATIONS), default=list(OPERATIONS), metavar="NAME", help="(default: all)"
    )
    add("--repeats", type=int, default=50, metavar="N", help="timed calls (default: 50)")
    add("--json", type=Path, metavar="FILE")
    args = parser.parse_args(words)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Compare and time every case; print a table and write JSON."""
    check_file(args.json)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = timing.bytes_per_second(device)
    with torch.inference_mode():
        rows = [
            time_case(name, case, device, args.repeats, bandwidth)
            for name in args.only
            for case in OPERATIONS[name](device)
        ]
    print_table(f"kernels on {device}, {bandwidth / 1e9:.0f} GB/s", HEADER, [line(row) for row in rows])
    print("\n".join(("", *DEFINITIONS)))
    if args.json:
        how = {"device": device.type, "gigabytes_per_second": round(bandwidth / 1e9, 1)}
        values = {"kind": "kernels", **provenance.collect(), "definitions": DEFINITIONS, "how": how, "rows": rows}
        write_json(args.json, values)
    return 0


def check_equal(name: str, case: Case) -> None:
    """Raise MtpcError where the kernel's result is not the definition's."""
    ours, expected = (part if isinstance(part, tuple) else (part,) for part in (case.kernel(), case.naive()))
    for our, wanted in zip(ours, expected, strict=True):
        if not torch.allclose(our.double(), wanted.double(), rtol=CLOSE, atol=CLOSE):
            raise MtpcError(f"{name}, {case.sizes}: the kernel differs from its definition; run tests/kernels")


def time_case(name: str, case: Case, device: torch.device, repeats: int, bandwidth: float) -> dict[str, Any]:
    """Time one case; the kernel on a GPU alone, after the comparison with its definition."""
    if case.kernel:
        check_equal(name, case)
    calls = {"kernel_ms": case.kernel, "naive_ms": case.naive, "eager_ms": case.eager}
    times = {key: call and timing.measure(call, device, repeats) for key, call in calls.items()}
    floor_ms = round(1000 * case.moved / bandwidth, 5)
    return {"operation": name, "sizes": case.sizes, **times, "bytes": case.moved, "floor_ms": floor_ms}


def line(row: dict[str, Any]) -> list[str]:
    """Format a row of the table."""
    times = [f"{ms[0]:.4f}" if (ms := row[key]) else "-" for key in ("kernel_ms", "naive_ms", "eager_ms")]
    return [row["operation"], row["sizes"], *times, f"{row['bytes'] / 2**20:.3f}", f"{row['floor_ms']:.4f}"]


if __name__ == "__main__":
    sys.exit(main())
