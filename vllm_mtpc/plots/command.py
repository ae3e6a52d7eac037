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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_mtpc.checkpoint.locate import PROVENANCE_FILE, find_head, resolve_head, resolve_verifier
from vllm_mtpc.engine.provenance import collect
from vllm_mtpc.errors import CheckpointError, UsageError
from vllm_mtpc.files import read_json
from vllm_mtpc.plots.heads import Point, plot_acceptance, plot_frontier
from vllm_mtpc.plots.served import plot_served
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

    @property
    def target(self) -> str:
        return resolve_verifier(self.folder, self.config.speculators_config.verifier.name_or_path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "heads", nargs="+", metavar="HEAD", help="head folders or hub names, of one target; or results of bench serve"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the plots and frontier.json (results: default beside them)"
    )
    parser.add_argument("--target", metavar="MODEL", help="in place of the one the heads name")
    parser.add_argument("--repeats", type=int, default=30, metavar="N", help="timed steps of each head (default: 30)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the weights")


def run(args: argparse.Namespace) -> int:
    if all(name.endswith(".json") for name in args.heads):
        return draw_results([Path(name) for name in args.heads], args.out)
    if args.out is None:
        raise UsageError("--out is missing: name the folder that the plots of heads are to be written to")
    if args.repeats < 1 or (args.threads is not None and args.threads < 1):
        raise UsageError(f"repeats={args.repeats}, threads={args.threads}: both must be 1 or more")
    heads = [read(name) for name in args.heads]
    target = args.target or one_target(heads)
    import torch

    from vllm_mtpc.hf import choose_device

    device = str(choose_device(args.device))
    check_folder(args.out)
    if args.threads:
        torch.set_num_threads(args.threads)
    labels = labels_of(heads)
    files = plot_acceptance({label: head.results for label, head in zip(labels, heads, strict=True)}, args.out)
    rows = measure(dict(zip(labels, heads, strict=True)), target, device, getattr(torch, args.dtype), args.repeats)
    files += plot_frontier([Point(**{key: row[key] for key in Point._fields}) for row in rows], args.out)
    how = {"device": device, "dtype": args.dtype, "threads": torch.get_num_threads(), "repeats": args.repeats}
    file = args.out / FRONTIER_FILE
    how |= {"batch": 1, "context": CONTEXT}
    write_json(file, {**collect(), "definitions": list(DEFINITIONS), "how": how, "rows": rows})
    _print(rows, how)
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

    place = resolve_head(name)
    folder = find_head(place) or place
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


def one_target(heads: Sequence[Measured]) -> str:
    """The target that all heads name. Raises UsageError where they differ."""
    names = list(dict.fromkeys(head.target for head in heads))
    if len(names) > 1:
        raise UsageError(
            f"heads of different targets ({', '.join(names)}) have no common frontier; plot the heads of one target"
        )
    return names[0]


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


def measure(
    heads: dict[str, Measured], target_name: str, device: str, dtype: Any, repeats: int
) -> list[dict[str, Any]]:
    """Rows of the table: fields of `Point`, the parts of a step in milliseconds, and tokens/s.

    Plain decoding comes first, at each temperature that some head has results of.
    """
    from vllm_mtpc.eval.loading import attach
    from vllm_mtpc.hf import load_target

    target = load_target(target_name, dtype, device)
    temperatures = [key for key in ("t1", "t0") if any(key in head.results for head in heads.values())]
    forwards = {1: forward_milliseconds(target, 1, repeats)}
    rows = [_row("plain", None, key, forwards[1], 0.0, 1.0, 0.0) for key in temperatures]
    for label, measured in heads.items():
        if measured.config.lora_layers:
            print(f"{label}: draft layers are not timed here; left out of the frontier", file=sys.stderr)
            continue
        head = attach(measured.folder, target).head.to(dtype)
        for key, results in measured.results.items():
            positions = 1 + len(results["per_position"])
            if positions not in forwards:
                forwards[positions] = forward_milliseconds(target, positions, repeats)
            draft = draft_milliseconds(head, positions, key == "t0", target, repeats)
            values = results["tokens_per_step"], results["standard_error"]
            rows.append(_row(label, measured.config.circuit, key, forwards[positions], draft, *values))
    return rows


def _row(
    label: str, circuit: str | None, key: str, forward: float, draft: float, tokens: float, error: float
) -> dict[str, Any]:
    point = Point(label, circuit, key, round(forward + draft, 4), tokens, error)
    parts = {"forward_milliseconds": round(forward, 4), "draft_milliseconds": round(draft, 4)}
    return point._asdict() | parts | {"tokens_per_second": round(point.tokens_per_second, 2)}


def forward_milliseconds(target: Target, rows: int, repeats: int) -> float:
    """Median time of the target over `rows` tokens behind CONTEXT cached ones, next-token logits of all included."""
    import torch

    from vllm_mtpc.hf.session import Session

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


def _print(rows: list[dict[str, Any]], how: dict[str, Any]) -> None:
    title = f"batch 1, {how['device']}, {how['dtype']}, {how['threads']} CPU threads, medians of {how['repeats']}"
    header = ("head", "T", "tokens/step", "s.e.", "forward ms", "draft ms", "step ms", "tokens/s")
    lines = [
        [
            row["label"],
            row["temperature"].removeprefix("t"),
            *(f"{row[key]:.3f}" for key in ("tokens_per_step", "standard_error")),
            *(f"{row[key]:.2f}" for key in ("forward_milliseconds", "draft_milliseconds", "milliseconds")),
            f"{row['tokens_per_second']:.1f}",
        ]
        for row in rows
    ]
    print_table(title, header, lines)
    print("\n" + "\n".join(DEFINITIONS))
