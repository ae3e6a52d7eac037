"""Which head, how many drafts and which schedule: from each head's acceptance and measured costs.

Tokens per second of c requests with K drafts each: 1000 c E(K) / (step ms + draft ms), E(K) = 1 + sum over k <= K of
P(drafts 1..k accepted), as the trainer measured it at the nearer of temperatures 0 and 1 (provenance.json). Costs come
from a file of curves, measured on this machine by --measure (engine/steps.py) or elsewhere. It is an estimate: measure
what it recommends with `vllm-mtpc bench serve`. The file that --measure writes and --curves reads is JSON:

    {"step_ms":  [[batch, rows, ms], ...],             a step of the target without its draft: rows = batch (1 + drafts)
     "draft_ms": {"NAME": [[batch, drafts, ms], ...]}, the draft of head NAME (its folder's name, or its circuit)
     "temperature": ..., "target": ..., "hardware", "versions", "commit", "command"}
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vllm_mtpc.bench.decodings import arguments, kind_of
from vllm_mtpc.checkpoint.inspect import measured_acceptance
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.steps import Cell, measure
from vllm_mtpc.errors import UsageError
from vllm_mtpc.flags import check_positive
from vllm_mtpc.report import check_file, print_table, write_json

if TYPE_CHECKING:
    import argparse

CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
WORTH = 1.01  # fewer drafts are preferred where more gain less than this


class Candidate(NamedTuple):
    """A head: its name, what its draft curve may be called, and E(K) for K = 0 .. the most drafts."""

    name: str
    method: str
    circuit: str
    window: int
    tokens: tuple[float, ...]

    @property
    def called(self) -> tuple[str, str]:
        return Path(self.name).name, self.circuit


class Choice(NamedTuple):
    """The best K of a head for so many requests."""

    batch: int
    drafts: int
    tokens_per_second: float
    gain: float  # by decoding without drafts


class Curve:
    """Milliseconds by batch and a second number of it (rows or drafts): linear between what was measured.

    Beyond the largest batch the last slope goes on; elsewhere outside of what was measured the nearest value holds.
    """

    def __init__(self, points: Any, what: str, per_request: bool = False) -> None:
        """per_request: neighbouring batches are asked for the second number of each request, not of the whole batch."""
        is_list = isinstance(points, list) and points and all(isinstance(point, list) for point in points)
        if not is_list or not all(len(point) == 3 and all(map(_is_known, point)) for point in points):
            raise UsageError(
                f"{what}: allowed is a list, with one entry at least, of [batch, number, ms], all from 0 on"
            )
        self.per_request = per_request
        self.by_batch: dict[int, list[tuple[float, float]]] = {}
        for batch, number, ms in points:
            self.by_batch.setdefault(int(batch), []).append((number, ms))

    def at(self, batch: int, number: float) -> float:
        """ms at (batch, number)."""
        across = []
        for known, points in self.by_batch.items():
            wanted = number * known / batch if self.per_request else number
            numbers, times = zip(*sorted(points), strict=True)
            across.append((known, float(np.interp(wanted, numbers, times))))
        xs, ys = zip(*sorted(across), strict=True)
        if len(xs) > 1 and batch > xs[-1]:
            return ys[-1] + max(0.0, (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])) * (batch - xs[-1])
        return float(np.interp(batch, xs, ys))


class Curves:
    """A file of cost curves."""

    def __init__(self, values: Any, source: str = "curves") -> None:
        if not isinstance(values, dict) or not isinstance(values.get("draft_ms"), dict):
            raise UsageError(
                f'{source}: no cost curves; a file with "step_ms" and "draft_ms" is needed: vllm-mtpc advise --measure'
            )
        self.source = source
        self.step_curve = Curve(values.get("step_ms"), f"{source}: step_ms", per_request=True)
        self.draft_curves = {
            name: Curve(points, f"{source}: draft_ms[{name!r}]") for name, points in values["draft_ms"].items()
        }

    @classmethod
    def read(cls, file: Path) -> Curves:
        """Raises UsageError."""
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"{file}: cannot be read as JSON ({error}); name a file of --measure") from None
        return cls(values, str(file))

    def step(self, batch: int, drafts: int) -> float:
        """ms of a step of the target that verifies so many drafts of each request."""
        return self.step_curve.at(batch, batch * (1 + drafts))

    def draft(self, names: Sequence[str], batch: int, drafts: int) -> float:
        """ms of a draft; `names`: what the head may be called there, the first that is known counts."""
        if drafts == 0:
            return 0.0
        name = next((name for name in names if name in self.draft_curves), None)
        if name is None:
            raise UsageError(
                f"{self.source}: has drafts of {', '.join(self.draft_curves) or 'no head'}, none called "
                f"{' or '.join(names)}; measure it: vllm-mtpc advise {names[0]} --measure FILE"
            )
        return self.draft_curves[name].at(batch, drafts)


def _is_known(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < math.inf


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("heads", nargs="+", metavar="HEAD", help="head folders or hub names to choose from")
    add("--curves", type=Path, metavar="FILE", help="costs that were measured before")
    add("--measure", type=Path, metavar="FILE", help="measure the costs on this machine, and write them to FILE")
    add("--concurrency", type=int, nargs="+", default=list(CONCURRENCY), metavar="C", help="requests at once")
    add("--temperature", type=float, default=1.0, metavar="T", help="of the requests (default: 1)")
    add("--target", metavar="MODEL", help="with --measure: folder or hub name (default: the first head's verifier)")
    add("--dtype", default="auto", metavar="DTYPE", help="with --measure: the target computes in (default: its own)")
    add("--steps", type=int, default=20, metavar="N", help="with --measure: steps of each cell (default: 20)")


def run(args: argparse.Namespace) -> int:
    """Prints the table and the options to type."""
    check_positive(args, "steps")
    batches = sorted(set(args.concurrency))
    if batches[0] < 1:
        raise UsageError(f"--concurrency {batches[0]}: allowed are 1 and above; give it positive numbers")
    if args.temperature < 0:
        raise UsageError(f"--temperature {args.temperature}: allowed are 0 and above")
    if (args.curves is None) == (args.measure is None):
        raise UsageError("either --curves FILE (measured before) or --measure FILE (measure now) is needed; type one")
    heads = [candidate(name, args.temperature) for name in args.heads]
    check_file(args.measure, "--measure")
    curves = Curves.read(args.curves) if args.curves else Curves(_measure(args, heads, batches), str(args.measure))
    found = {head.name: choices(head, curves, batches) for head in heads}
    title = "best K, expected tokens/s and speed by plain decoding, by requests at once"
    lines = [
        [
            *(head.called[0], head.circuit, str(head.window), f"{head.tokens[-1]:.2f}"),
            *(f"K={one.drafts} {one.tokens_per_second:.0f} {one.gain:.2f}x" for one in found[head.name]),
        ]
        for head in heads
    ]
    print_table(title, ["head", "circuit", "n", "E(K)", *(f"c={batch}" for batch in batches)], lines)
    # gains multiplied: no concurrency counts more than another
    best = max(heads, key=lambda head: math.prod(choice.gain for choice in found[head.name]))
    print(f"best over these concurrencies: {best.name} ({best.circuit}, n={best.window}); expected, not measured")
    for place, batch in enumerate(batches):
        head = max(heads, key=lambda head: found[head.name][place].tokens_per_second)
        choice = found[head.name][place]
        print(f"  c={batch}: {head.name}, n={head.window}, K={choice.drafts}, {choice.gain:.2f}x plain")
    print(f"--speculative-config '{json.dumps(speculative_config(best, found[best.name]))}'")
    return 0


def candidate(name: str, temperature: float) -> Candidate:
    """A head by folder or hub name. Raises UsageError where its acceptance is not known."""
    from vllm_mtpc.eval.loading import resolve

    folder, config = resolve(name)
    key = "t1" if temperature >= 0.5 else "t0"
    accepted = measured_acceptance(folder).get(key)
    if accepted is None:
        raise UsageError(
            f"head {folder}: provenance.json has no acceptance at temperature {key[1]}; a head trained by vllm-mtpc "
            "train has, retrain it or leave it out"
        )
    tokens = tuple(accumulate(accepted[: config.window - 1], initial=1.0))
    return Candidate(str(name), config.speculators_model_type, kind_of(config), config.window, tokens)


def choices(head: Candidate, curves: Curves, batches: Sequence[int]) -> list[Choice]:
    """The best K for each number of requests."""
    found = []
    for batch in batches:
        speeds = [
            1000 * batch * tokens / (curves.step(batch, drafts) + curves.draft(head.called, batch, drafts))
            for drafts, tokens in enumerate(head.tokens)
        ]
        drafts = next(drafts for drafts, speed in enumerate(speeds) if speed * WORTH >= max(speeds))
        found.append(Choice(batch, drafts, speeds[drafts], speeds[drafts] / speeds[0]))
    return found


def speculative_config(head: Candidate, found: Sequence[Choice]) -> dict[str, Any]:
    """What to serve it with: the K of each concurrency holds for the batch sizes down to the one before."""
    ranges, start = [], 1
    for drafts, same in groupby(found, key=lambda choice: choice.drafts):
        last = max(choice.batch for choice in same)
        ranges.append([start, last, drafts])
        start = last + 1
    most = max(choice.drafts for choice in found)
    drafting = {"num_speculative_tokens": most} if most else {}
    by_size = {"num_speculative_tokens_per_batch_size": ranges}
    return {"method": head.method, "model": head.name, **drafting, **by_size}


def _measure(args: argparse.Namespace, heads: Sequence[Candidate], batches: Sequence[int]) -> dict[str, Any]:
    """The curves of all heads on this machine, written to args.measure."""
    import torch
    from tqdm import tqdm

    from vllm_mtpc.eval.loading import resolve, target_of

    target = target_of(*resolve(heads[0].name), args.target)
    on_gpu = torch.cuda.is_available()
    steps: dict[tuple[int, int], float] = {}
    drafts: dict[str, list[list[float]]] = {}
    jobs = [(head, most, wanted) for head in heads for most, wanted in _engines(batches, len(head.tokens) - 1, on_gpu)]
    longest = 2 * (args.steps + 8) * max(len(head.tokens) for head in heads) + 64
    base = arguments(target, args.dtype, longest, max(batches), on_gpu, {})
    with tqdm(total=sum(len(wanted) for _, _, wanted in jobs), desc="measuring", unit="cell") as bar:
        for number, (head, most, wanted) in enumerate(jobs):
            bar.set_postfix_str(f"{head.called[0]}, engine {number + 1} of {len(jobs)}")
            log = args.measure.with_suffix(f".{head.called[0]}.{most}.log")
            speculative: dict[str, Any] = {"method": head.method, "model": head.name, "num_speculative_tokens": most}
            speculative["num_speculative_tokens_per_batch_size"] = "off"  # K is set from outside
            if head.method == "mtpc":
                speculative["min_survival"] = 0
            engine = {**base, "speculative_config": speculative}
            for cell in measure(engine, wanted, args.steps, args.temperature, log):
                bar.update()
                if cell["step_ms"] is None:
                    continue
                at = (cell["batch"], cell["batch"] * (1 + cell["drafts"]))
                steps[at] = min(steps.get(at, float("inf")), cell["step_ms"])
                if cell["drafts"]:
                    drafts.setdefault(head.called[0], []).append([cell["batch"], cell["drafts"], cell["draft_ms"]])
    values = {
        "step_ms": [[*at, ms] for at, ms in sorted(steps.items())],
        "draft_ms": drafts,
        "temperature": args.temperature,
        "target": Path(target).name,
        **provenance.collect(),
    }
    write_json(args.measure, values)
    return values


def _engines(batches: Sequence[int], most: int, on_gpu: bool) -> list[tuple[int, list[Cell]]]:
    """(drafts an engine is built for, its cells): on a GPU one engine per K, as graphs are captured for its K."""
    found = cells(batches, most)
    if not on_gpu:
        return [(most, found)]
    lengths = sorted({drafts for _, drafts in found})
    return [(max(1, length), [cell for cell in found if cell[1] == length]) for length in lengths]


def cells(batches: Sequence[int], num_drafts: int) -> list[Cell]:
    """What is measured: every batch size, with 0, 1, 2, 4, ... and all drafts."""
    powers = {1 << power for power in range(num_drafts.bit_length())}
    return [(batch, drafts) for batch in batches for drafts in sorted({0, num_drafts} | powers)]
