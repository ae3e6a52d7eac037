"""`vllm-mtpc plot`: heads side by side, what they accept and what a step of each takes on this machine.

Acceptance comes from the results that training or `vllm-mtpc eval` wrote into a head's provenance.json. Latency is
measured here, at batch 1 on transformers: the target's forward over the rows of a step on a key-value cache, and the
draft, i.e. the head at one hidden state and the tokens drawn from its circuit. An engine adds its own overhead to both;
what it serves is measured with `vllm-mtpc bench serve`, whose results (`vllm-mtpc plot FILE.json`) are drawn, too.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mtpc.checkpoint.locate import PROVENANCE_FILE, resolve_head
from vllm_mtpc.engine.provenance import collect
from vllm_mtpc.errors import CheckpointError, UsageError
from vllm_mtpc.files import read_json
from vllm_mtpc.flags import check_positive
from vllm_mtpc.plots.draw import Point, plot_acceptance, plot_frontier, plot_served
from vllm_mtpc.report import SERVED, check_folder, print_table, write_json

if TYPE_CHECKING:
    import argparse

    from vllm_mtpc.config.mtpc import HeadConfig
    from vllm_mtpc.hf import Target

FRONTIER_FILE = "frontier.json"
CONTEXT = 32  # tokens in the key-value cache before a step; at batch 1 the weights are what takes time
DEFINITIONS = (
    "tokens/step: the target's own token included (plain decoding is 1.00); from each head's provenance.json.",
    "milliseconds of a step: the target's forward over 1 + K rows and the draft of K tokens, medians at batch 1 on "
    "transformers, not on vLLM.",
    "tokens/s: tokens/step by the seconds of a step.",
)


class Measured(NamedTuple):
    """A head with its results."""

    folder: Path
    config: HeadConfig
    results: dict[str, Any]  # "t1", "t0" -> as `vllm-mtpc eval` measures them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("heads", nargs="+", metavar="HEAD", help="head folders or hub names, of one target; or results of bench serve")
    out = "folder of the plots and frontier.json (results: default next to them)"
    add("--out", type=Path, metavar="DIR", help=out)
    add("--target", metavar="MODEL", help="in place of the one the heads name")
    add("--repeats", type=int, default=30, metavar="N", help="timed steps of each head (default: 30)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the weights")


def run(args: argparse.Namespace) -> int:
    if all(name.endswith(".json") for name in args.heads):
        return draw_results([Path(name) for name in args.heads], args.out)
    if args.out is None:
        raise UsageError("--out is missing: name the folder that the plots of heads are to be written to")
    check_positive(args, "repeats")
    import torch

    from vllm_mtpc.eval.loading import target_of
    from vllm_mtpc.hf import choose_device, load_target

    heads = [read(name) for name in args.heads]
    targets = list(dict.fromkeys(target_of(head.folder, head.config, args.target) for head in heads))
    if len(targets) > 1:
        named = ", ".join(targets)
        raise UsageError(f"heads of different targets ({named}) have no common frontier; plot the heads of one target")
    device = choose_device(args.device)
    check_folder(args.out)
    labelled = dict(zip(labels_of(heads), heads, strict=True))
    files = plot_acceptance({label: head.results for label, head in labelled.items()}, args.out)
    points = measure(labelled, load_target(targets[0], getattr(torch, args.dtype), device), args.repeats)
    files += plot_frontier(points, args.out)
    rows = [point._asdict() | {"tokens_per_second": round(point.tokens_per_second, 2)} for point in points]
    how = {"device": str(device), "dtype": args.dtype, "threads": torch.get_num_threads(), "repeats": args.repeats}
    how |= {"batch": 1, "context": CONTEXT}
    file = args.out / FRONTIER_FILE
    write_json(file, {**collect(), "definitions": list(DEFINITIONS), "how": how, "rows": rows})
    _print(points, how)
    print("written: " + ", ".join(str(path) for path in [*files, file]))
    return 0


def draw_results(files: Sequence[Path], out: Path | None) -> int:
    """Plots of results of `vllm-mtpc bench serve`, named like the file. Raises UsageError for another file."""
    check_folder(out)
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{file}: cannot be read ({error}); name a file written by vllm-mtpc bench serve"
            ) from None
        if not isinstance(found, dict) or found.get("kind") != SERVED:
            raise UsageError(f"{file}: not a result of vllm-mtpc bench serve; write one with its --json FILE")
        written = plot_served(found["rows"], out or file.parent, file.stem)
        print("written: " + ", ".join(map(str, written)))
    return 0


def read(name: str) -> Measured:
    """A head's config and the results in its provenance.json. Raises an MtpcError where it has none."""
    from vllm_mtpc.checkpoint.load import read_circuit_config

    folder = resolve_head(name)
    config = read_circuit_config(folder)
    try:
        figures = read_json(folder / PROVENANCE_FILE)["figures"]
        found = {key: figures[key] for key in ("t1", "t0") if key in figures}
        for values in found.values():  # the file is anyone's: what is drawn must be numbers
            sum([values["tokens_per_step"], values["standard_error"], *values["per_position"]], start=0.0)
    except (CheckpointError, KeyError, TypeError):
        found = {}
    if not found:
        raise UsageError(
            f"{name}: its {PROVENANCE_FILE} holds no figures at T=1 or T=0; train it with evaluation_sequences above 0"
        )
    return Measured(folder, config, found)


def labels_of(heads: Sequence[Measured]) -> list[str]:
    """A name for each head, no two the same: circuit and r, with n, then the folder, where that is not enough."""
    tries = (
        "{config.circuit} r={config.num_components}",
        "{config.circuit} n={config.window} r={config.num_components}",
        "{config.circuit} {name}",
        "{config.circuit} {folder}",
    )
    for one in tries:
        labels = [one.format(**head._asdict(), name=head.folder.resolve().name) for head in heads]
        if len(set(labels)) == len(labels):
            return labels
    raise UsageError("the same head is named twice; name each head once")


def measure(heads: dict[str, Measured], target: Target, repeats: int) -> list[Point]:
    """Plain decoding, at each temperature that some head has results of, and the heads."""
    from vllm_mtpc.eval.loading import attach

    def point(label: str, circuit: str | None, key: str, draft: float, results: dict[str, Any]) -> Point:
        forward = forward_of(1 + len(results["per_position"]))
        numbers = round(forward + draft, 4), results["tokens_per_step"], results["standard_error"]
        return Point(label, circuit, key, *numbers, round(forward, 4), round(draft, 4))

    forward_of = cache(lambda positions: forward_milliseconds(target, positions, repeats))
    plain = {"per_position": [], "tokens_per_step": 1.0, "standard_error": 0.0}
    temperatures = [key for key in ("t1", "t0") if any(key in head.results for head in heads.values())]
    points = [point("plain", None, key, 0.0, plain) for key in temperatures]
    for label, measured in heads.items():
        if measured.config.has_draft_layers:
            print(f"{label}: draft layers are not timed here; left out of the frontier", file=sys.stderr)
            continue
        evaluator: Any = attach(measured.folder, target)  # of a circuit
        head = evaluator.head.to(target.dtype)
        for key, results in measured.results.items():
            draft = draft_milliseconds(head, 1 + len(results["per_position"]), key == "t0", target, repeats)
            points.append(point(label, measured.config.circuit, key, draft, results))
    return points


def forward_milliseconds(target: Target, rows: int, repeats: int) -> float:
    """Median time of the target over `rows` tokens behind CONTEXT cached ones, next-token logits of all included."""
    import torch

    from vllm_mtpc.hf import Session

    session = Session(target)
    generator = torch.Generator().manual_seed(0)
    session.start([torch.randint(0, target.vocab_size, (CONTEXT,), generator=generator)])
    tokens = torch.randint(0, target.vocab_size, (1, rows), generator=generator)

    def step() -> None:
        session.logits(session.read(tokens))
        session.crop(rows)

    return _median_milliseconds(step, target, repeats)


def draft_milliseconds(head: Any, positions: int, greedy: bool, target: Target, repeats: int) -> float:
    """Median time of a draft: circuit parameters of `positions` tokens at one state, x_1 observed, the rest picked."""
    import torch

    hidden = torch.randn(1, head.hidden_size, generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(target.device, next(head.parameters()).dtype)
    first = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    pick = head.circuit.greedy if greedy else head.circuit.sample
    return _median_milliseconds(lambda: pick(head(hidden, positions), first), target, repeats)


def _median_milliseconds(step: Callable[[], Any], target: Target, repeats: int) -> float:
    """Median of `repeats` calls after a warm-up; a GPU is waited for in each."""
    import torch

    def timed() -> float:
        started = time.perf_counter()
        step()
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        return 1000 * (time.perf_counter() - started)

    with torch.inference_mode():
        for _ in range(max(2, repeats // 5)):
            timed()
        return statistics.median(timed() for _ in range(repeats))


def _print(points: Sequence[Point], how: dict[str, Any]) -> None:
    title = f"batch 1, {how['device']}, {how['dtype']}, {how['threads']} CPU threads, medians of {how['repeats']}"
    header = ("head", "T", "tokens/step", "s.e.", "forward ms", "draft ms", "step ms", "tokens/s")
    lines = []
    for one in points:
        times = one.forward_milliseconds, one.draft_milliseconds, one.milliseconds
        numbers = [f"{value:.3f}" for value in (one.tokens_per_step, one.standard_error)]
        numbers += [*(f"{value:.2f}" for value in times), f"{one.tokens_per_second:.1f}"]
        lines.append([one.label, one.temperature.removeprefix("t"), *numbers])
    print_table(title, header, lines)
    print("\n" + "\n".join(DEFINITIONS))
