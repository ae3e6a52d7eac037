"""`vllm-mtpc bench kernels`: each kernel against its definition in PyTorch and against an eager chain, on a GPU.

An operation is reported only where its own tests have just passed on this machine. On a machine without a GPU there is
nothing to time but the definition: what Triton's interpreter takes is not a speed.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_mtpc.bench.kernel_cases import OPERATIONS, Case, Operation
from vllm_mtpc.report import check_file, print_table, write_json

KIND = "bench kernels"
ROOT = Path(__file__).parents[2]
ABSENT, REFUSED, TIMED = "absent", "refused", "timed"
TEST_SECONDS = 1800
DEFINITIONS = (
    "naive: the definition in PyTorch; eager: the same result as a chain of PyTorch's own operations, as one would "
    "write it without a kernel (- where that is the definition).",
    "MiB: what must be read and written at least; floor ms: these bytes at the bandwidth of a large copy here.",
    "Times are medians; on a GPU caches are overwritten between calls.",
)


class Verdict(NamedTuple):
    """What the tests of an operation say."""

    state: str
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", nargs="+", choices=sorted(OPERATIONS), metavar="NAME", help=f"of {', '.join(OPERATIONS)} (all)")
    add("--repeats", type=int, default=50, metavar="N", help="timed calls (default: 50)")
    add("--json", type=Path, metavar="FILE", help="write the result there")


def run(args: argparse.Namespace) -> int:
    import torch
    from tqdm import tqdm

    from vllm_mtpc.bench import timing
    from vllm_mtpc.engine import provenance

    check_file(args.json)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bandwidth = timing.bytes_per_second(device)
    verdicts: dict[str, Verdict] = {}
    rows: list[dict[str, Any]] = []
    with tqdm(args.only or list(OPERATIONS), unit="operation", disable=None) as bar:
        for name in bar:
            bar.set_description(f"{name}: tests")
            verdicts[name] = judge(name, OPERATIONS[name])
            if verdicts[name].state == TIMED:
                bar.set_description(f"{name}: times")
                rows += [row(name, case, device, args.repeats, bandwidth) for case in OPERATIONS[name].setup(device)]
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, kernels not run"
    print_table(f"kernels, {where}, {bandwidth / 1e9:.0f} GB/s", *table(rows))
    print()
    for name, verdict in verdicts.items():
        print(f"{name}: {verdict.state}: {verdict.reason}")
    print("\n".join(DEFINITIONS))
    if args.json:
        result = {
            "kind": KIND,
            **provenance.collect(),
            "definitions": list(DEFINITIONS),
            "how": {"device": device.type, "gigabytes_per_second": round(bandwidth / 1e9, 1)},
            "operations": {name: verdict._asdict() for name, verdict in verdicts.items()},
            "rows": rows,
        }
        write_json(args.json, result)
    return 1 if any(verdict.state == REFUSED for verdict in verdicts.values()) else 0


def judge(name: str, operation: Operation) -> Verdict:
    """Runs the operation's tests; only what has passed is timed."""
    places = importlib.util.find_spec("vllm_mtpc.kernels").submodule_search_locations
    if not any((Path(place) / name / "kernel.py").is_file() for place in places):
        return Verdict(ABSENT, f"there is no kernels/{name}/kernel.py")
    files = [ROOT / "tests" / "kernels" / file for file in operation.tests]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        return Verdict(REFUSED, f"its tests were not found: {', '.join(missing)}; run in a checkout of this package")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TEST_SECONDS)
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
    import torch

    from vllm_mtpc.bench.timing import measure

    calls = {"naive": case.naive, "eager": case.eager, "kernel": case.kernel if device.type == "cuda" else None}
    with torch.inference_mode():
        times = {key: None if call is None else measure(call, device, repeats) for key, call in calls.items()}
    own = times["kernel"]
    return {
        "operation": name,
        "sizes": case.sizes,
        **{f"{key}_ms": None if time is None else time.to_json() for key, time in times.items()},
        "bytes": case.moved,
        "floor_ms": round(1000 * case.moved / bandwidth, 5),
        "of_bandwidth": None if own is None else round(1000 * case.moved / bandwidth / own.median, 4),
    }


def table(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = [
        "operation",
        "sizes",
        "kernel ms",
        "naive ms",
        "eager ms",
        "naive / kernel",
        "MiB",
        "floor ms",
        "of floor",
    ]
    lines = []
    for one in rows:
        times = {key: one[f"{key}_ms"] for key in ("kernel", "naive", "eager")}
        gain = "-" if times["kernel"] is None else f"{times['naive'][0] / times['kernel'][0]:.1f}x"
        share = "-" if one["of_bandwidth"] is None else f"{one['of_bandwidth']:.0%}"
        shown = [
            "not run" if key == "kernel" and time is None else "-" if time is None else f"{time[0]:.4f}"
            for key, time in times.items()
        ]
        size = f"{one['bytes'] / 2**20:.3f}"
        lines.append([one["operation"], one["sizes"], *shown, gain, size, f"{one['floor_ms']:.4f}", share])
    return [*header, "floor ms", "of floor"], lines
