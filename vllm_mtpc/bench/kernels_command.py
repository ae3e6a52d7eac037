"""`vllm-mtpc bench kernels`: each kernel against its definition in PyTorch and against an eager chain, on a GPU.

An operation is reported only where its own tests have just passed on this machine. On a machine without a GPU there is
nothing to time but the definition: what Triton's interpreter takes is not a speed.

OPERATIONS has an entry per folder of `kernels/`, with cases on random inputs. An eager chain is what one would write
with PyTorch's own operations where no kernel is at hand.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from vllm_mtpc.bench import timing
from vllm_mtpc.circuits import CIRCUITS, CircuitParams, circuit_class, get_circuit
from vllm_mtpc.kernels.bigram import Bigram
from vllm_mtpc.kernels.draft import naive
from vllm_mtpc.report import check_file

KIND = "bench kernels"
ROOT = Path(__file__).parents[2]
ABSENT, REFUSED, TIMED = "absent", "refused", "timed"
TEST_SECONDS = 1800
Call = Callable[..., Any]
BYTES, SUBWORDS = 320, 32000  # vocabularies
DEFINITIONS = (
    "naive: the definition in PyTorch; eager: the same result as a chain of PyTorch's own operations, as one would "
    "write it without a kernel (- where that is the definition).",
    "MiB: what must be read and written at least; floor ms: these bytes at the bandwidth of a large copy here.",
    "Times are medians; on a GPU caches are overwritten between calls.",
)
COLUMNS = (
    ("operation", "operation"),
    ("sizes", "sizes"),
    ("kernel ms", lambda row: (row["kernel_ms"] and f"{row['kernel_ms'][0]:.4f}") or "not run"),
    ("naive ms", "naive_ms", "{0[0]:.4f}"),
    ("eager ms", "eager_ms", "{0[0]:.4f}"),
    ("naive / kernel", lambda row: row["kernel_ms"] and row["naive_ms"][0] / row["kernel_ms"][0], "{:.1f}x"),
    ("MiB", lambda row: row["bytes"] / 2**20, "{:.3f}"),
    ("floor ms", "floor_ms", "{:.4f}"),
    ("of floor", "of_bandwidth", "{:.0%}"),
)


class Case(NamedTuple):
    """One size of an operation. ``moved``: bytes that must be read and written at least."""

    sizes: str
    naive: Call
    moved: int
    kernel: Call | None = None  # None: there is no GPU
    eager: Call | None = None  # None: the definition is that chain


class Operation(NamedTuple):
    """``tests``: files of tests/kernels that decide whether it is reported; ``setup``: its cases on a device."""

    tests: tuple[str, ...]
    setup: Callable[[torch.device], Iterator[Case]]


class Verdict(NamedTuple):
    """What the tests of an operation say."""

    state: str
    reason: str


def size_of(*tensors: Tensor) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def uniform(device: torch.device) -> Iterator[Case]:
    def eager(seed: Tensor, pos: Tensor) -> Tensor:
        return torch.rand(len(seed), device=device)  # another generator: what a draw costs

    for count in (64, 4096):
        seed = torch.randint(2**62, (count,), device=device)
        pos = torch.randint(2**20, (count,), device=device)
        yield _case("uniform.uniform", f"T={count}", (seed, pos), 4 * count, eager)


def pick(device: torch.device) -> Iterator[Case]:
    def eager(logits: Tensor, u: Tensor) -> Tensor:
        edges = logits.softmax(dim=-1).cumsum(dim=-1)
        return torch.searchsorted(edges, u[:, None], right=True)

    for rows, vocab_size in ((16, BYTES), (512, BYTES), (16, SUBWORDS), (512, SUBWORDS)):
        logits, u = torch.randn(rows, vocab_size, device=device) * 3, torch.rand(rows, device=device)
        yield _case("pick.pick", f"T={rows} V={vocab_size}", (logits, u), 8 * rows, eager)


def couple(device: torch.device) -> Iterator[Case]:
    for requests in (1, 64):
        width = 8
        tokens, drafts = torch.randint(2, (2, requests * width), device=device)  # half of the drafts are right
        begins = torch.arange(requests + 1, dtype=torch.int32, device=device) * width
        written = size_of(tokens) + 4 * requests
        yield _case("couple.accept", f"R={requests} K={width - 1}", (tokens, drafts, begins, width), written)


def filter_(device: torch.device) -> Iterator[Case]:
    for name, batch in ((name, batch) for name in CIRCUITS for batch in (64, 2048)):
        n, r = 16, min(32, circuit_class(name).max_components)
        circuit = get_circuit(name, n, r)
        evidence = torch.randn(batch, n, r, device=device) - 5
        sums = torch.randn(batch, r, device=device), torch.randn(batch, circuit.num_inner, r, r, device=device)
        given = (circuit.program, evidence, *sums)
        yield _case("filter.filter_weights", f"{name} n={n} r={r} B={batch}", given, size_of(evidence))


def draft(device: torch.device) -> Iterator[Case]:
    for name, vocab_size, batch in (
        (name, vocab, batch) for vocab in (BYTES, SUBWORDS) for name in CIRCUITS for batch in (1, 64)
    ):
        for token_rank in (0, 32):
            yield _draft(device, name, vocab_size, batch if vocab_size == BYTES else min(batch, 8), token_rank)


def _draft(device: torch.device, name: str, vocab_size: int, batch: int, token_rank: int) -> Case:
    n, r = 8, min(8, circuit_class(name).max_components)
    circuit, drafts = get_circuit(name, n, r), n - 1
    first = torch.zeros(batch, dtype=torch.int64, device=device)
    leaf = torch.randn(batch, n, r, vocab_size, device=device)
    evidence = leaf[:, 0].log_softmax(dim=-1)[..., 0]
    sums = torch.randn(batch, r, device=device), torch.randn(batch, circuit.num_inner, r, r, device=device)
    bigram = None
    if token_rank:
        source = torch.randn(vocab_size, token_rank, device=device) / token_rank**0.5
        bigram = Bigram(source, torch.randn(drafts, token_rank, vocab_size, device=device))
    params = (evidence, leaf[:, 1:], *sums, first, bigram)

    def gumbel(log_q: Tensor, k: int) -> Tensor:
        return (log_q - torch.empty_like(log_q).exponential_().log()).argmax(dim=-1)

    def eager() -> Tensor:
        root, inner = (part.log_softmax(dim=-1) for part in sums)
        whole = CircuitParams(leaf.log_softmax(dim=-1), root, inner, bigram)
        state, columns = circuit.observe(whole, circuit.start(whole), 0, first), []
        for k in range(1, n):
            columns.append(gumbel(circuit.next_log_probs(whole, state, k), k))
            state = circuit.observe(whole, state, k, columns[-1])
        return torch.stack(columns, dim=1)

    kernel = None
    if device.type == "cuda":
        drawn = timing.draft_kernel(circuit.program, tuple(params[1].shape), 1.0, device)
        kernel = partial(drawn, params)
    # of the bigram a row of W1 per draft, and W2
    read = size_of(*params[:5]) + (size_of(bigram.target) + 4 * batch * drafts * token_rank if bigram else 0)
    return Case(
        f"{name} V={vocab_size} n={n} r={r} B={batch}" + f" token_rank={token_rank}" * bool(token_rank),
        lambda: naive.draft(circuit.program, *params, pick=gumbel),
        read + 4 * batch * drafts * vocab_size + 12 * batch * drafts,
        kernel,
        eager,
    )


def leaf(device: torch.device) -> Iterator[Case]:
    def eager(states: Tensor, weight: Tensor, bias: None, token: Tensor) -> Tensor:
        logits = F.linear(states[:, 0], weight.flatten(0, 1)).view(-1, *weight.shape[:2]).float()
        index = token[:, None, None].expand(-1, weight.shape[0], 1)
        return logits.log_softmax(dim=-1).gather(2, index)

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for batch, r, vocab_size in ((batch, *size) for size in ((32, BYTES), (8, SUBWORDS)) for batch in (1, 16, 64)):
        hidden = 256 if device.type == "cpu" else 4096 if vocab_size == BYTES else 1024
        states = torch.randn(batch, 1, hidden, device=device, dtype=dtype)
        weight = torch.randn(r, vocab_size, hidden, device=device, dtype=dtype) / 64
        token = torch.randint(vocab_size, (batch,), device=device)
        sizes = f"x_1: B={batch} r={r} V={vocab_size} D={hidden}"
        yield _case("leaf.terms", sizes, (states, weight, None, token), 8 * batch * r, eager)


def _case(name: str, sizes: str, given: tuple[Any, ...], written: int, eager: Call | None = None) -> Case:
    """A function of a folder of `kernels/`, which is called alike in its kernel and its definition.

    written: bytes of what it writes; all tensors of `given` are read. eager: takes what they take.
    """
    folder, _, function = name.partition(".")
    tensors = [value for value in given if hasattr(value, "element_size")]

    def of(module: str) -> Call:
        call = getattr(import_module(f"vllm_mtpc.kernels.{folder}.{module}"), function)
        return lambda: call(*given)

    kernel = of("kernel") if tensors[0].device.type == "cuda" else None
    chain = None if eager is None else lambda: eager(*given)
    return Case(sizes, of("naive"), size_of(*tensors) + written, kernel, chain)


OPERATIONS = {
    "uniform": Operation(("test_uniform.py", "test_triton.py"), uniform),
    "pick": Operation(("test_pick.py", "test_triton.py"), pick),
    "couple": Operation(("test_couple.py",), couple),
    "filter": Operation(("test_filter.py",), filter_),
    "draft": Operation(("test_draft.py",), draft),
    "leaf": Operation(("test_leaf.py",), leaf),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", nargs="+", choices=sorted(OPERATIONS), metavar="NAME", help=f"of {', '.join(OPERATIONS)} (all)")
    add("--repeats", type=int, default=50, metavar="N", help="timed calls (default: 50)")
    add("--json", type=Path, metavar="FILE", help="write the result there")


def run(args: argparse.Namespace) -> int:
    check_file(args.json)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = timing.bytes_per_second(device)
    verdicts: dict[str, Verdict] = {}
    rows: list[dict[str, Any]] = []
    with torch.inference_mode(), tqdm(args.only or list(OPERATIONS), unit="operation", disable=None) as bar:
        for name in bar:
            bar.set_description(f"{name}: tests")
            verdicts[name] = judge(name, OPERATIONS[name])
            if verdicts[name].state == TIMED:
                bar.set_description(f"{name}: times")
                rows += [row(name, case, device, args.repeats, bandwidth) for case in OPERATIONS[name].setup(device)]
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, kernels not run"
    timing.publish(
        args.json,
        KIND,
        f"kernels, {where}, {bandwidth / 1e9:.0f} GB/s",
        COLUMNS,
        [f"{name}: {verdict.state}: {verdict.reason}" for name, verdict in verdicts.items()],
        rows,
        DEFINITIONS,
        how={"device": device.type, "gigabytes_per_second": round(bandwidth / 1e9, 1)},
        operations={name: verdict._asdict() for name, verdict in verdicts.items()},
    )
    return 1 if any(verdict.state == REFUSED for verdict in verdicts.values()) else 0


def judge(name: str, operation: Operation) -> Verdict:
    """Runs the operation's tests; only what has passed is timed."""
    places = import_module("vllm_mtpc.kernels").__path__
    if not any((Path(place) / name / "kernel.py").is_file() for place in places):
        return Verdict(ABSENT, f"there is no kernels/{name}/kernel.py")
    files = [ROOT / "tests" / "kernels" / file for file in operation.tests]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        return Verdict(REFUSED, f"its tests were not found: {', '.join(missing)}; run in a checkout of this package")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    # options of the shell's own pytest decide nothing here
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS)
    except subprocess.TimeoutExpired:
        return Verdict(REFUSED, f"its tests did not end within {TEST_SECONDS} s")
    last = next(iter(reversed(done.stdout.strip().splitlines())), "no output")
    if done.returncode or not passed(last):
        return Verdict(REFUSED, f"its tests did not pass: {last}")
    return Verdict(TIMED, f"its tests have passed: {last}")


def passed(summary: str) -> int:
    """How many tests pytest's last line says have passed; skipped ones prove nothing."""
    found = re.search(r"(\d+) passed", summary)
    return int(found[1]) if found else 0


def row(name: str, case: Case, device: Any, repeats: int, bandwidth: float) -> dict[str, Any]:
    """Times of one case; the kernel's only on a GPU."""
    calls = {"naive_ms": case.naive, "eager_ms": case.eager, "kernel_ms": case.kernel}
    if device.type != "cuda":
        calls["kernel_ms"] = None
    times = {key: call and timing.measure(call, device, repeats) for key, call in calls.items()}
    floor_ms = 1000 * case.moved / bandwidth
    return {
        "operation": name,
        "sizes": case.sizes,
        **times,
        "bytes": case.moved,
        "floor_ms": round(floor_ms, 5),
        "of_bandwidth": times["kernel_ms"] and round(floor_ms / times["kernel_ms"].median, 4),
    }
