"""Several training runs side by side: ``python -m benchmarks.sweep FILE --runs FOLDER [--json FILE]``.

FILE is YAML: ``title``, ``common`` (options of ``vllm-mtpc train``) and ``runs`` (name: what differs). Every run is a
folder in FOLDER; an existing one with the same options is not trained again. The table is made
from the runs' provenance.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.counters import DEFINITIONS
from vllm_mtpc.errors import UsageError
from vllm_mtpc.files import read_yaml
from vllm_mtpc.report import check_file, print_table, write_json
from vllm_mtpc.train.options import STATE_FOLDER, TrainOptions, parse
from vllm_mtpc.train.state import NAMES, changed_option, identity, latest_state, read_state

KEYS = {"title", "common", "runs"}
BITS = ("target", "joint")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sweep", description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML: title, common, runs")
    parser.add_argument("--runs", type=Path, required=True, metavar="FOLDER", help="where the heads are written")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="options for every run")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """The exit code; bad input is one line."""
    args = parser().parse_args(arguments)
    return guard("python -m benchmarks.sweep", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Train missing runs and print the table."""
    plan = read_plan(args.file)
    check_file(args.json)
    from vllm_mtpc.train.run import settled, train

    wanted = [settled(options) for options in plans(plan, changes(args.set), args.runs)]  # all, before one is trained
    rows = []
    for options in wanted:
        record = done(options)
        if record is None:
            print(f"--- {options.out.name}", flush=True)
            train(options.model_copy(update={"resume": is_begun(options)}), again="the same again")
            record = done(options)
        rows.append(row(options.out, record))
    print_table(plan["title"], *table(rows))
    if targets := [one["bits_per_byte"]["target"] for one in rows if "bits_per_byte" in one]:
        print(f"\nBits per byte of the target on the same text: {targets[0]:.3f}.")
    print("\nr: components of a circuit, LoRA rank of a PTP head.")
    if args.json:
        values = {"title": plan["title"], "definitions": DEFINITIONS.splitlines(), **provenance.collect(), "rows": rows}
        write_json(args.json, values)
    return 0


def read_plan(file: Path) -> dict[str, Any]:
    """A plan of its three keys. Raises UsageError for anything else."""
    plan = read_yaml(file)
    if set(plan) != KEYS:
        given = ", ".join(map(str, plan)) or "none"
        raise UsageError(f"{file}: its keys are {given}; expected are {', '.join(sorted(KEYS))}")
    for key in ("common", "runs"):
        if not isinstance(plan[key], dict):
            raise UsageError(f"{file}: {key} is {plan[key]!r}; expected are keys with values")
    for name, changed in plan["runs"].items():
        if changed is not None and not isinstance(changed, dict):
            raise UsageError(f"{file}: run {name} is {changed!r}; expected are options with values, or nothing")
    return plan


def changes(words: list[str]) -> dict[str, str]:
    """Options of --set. Raises UsageError for a word that is not KEY=VALUE."""
    pairs = [word.partition("=") for word in words]
    for key, separator, value in pairs:
        if not key or not separator:
            raise UsageError(f"--set {key}{separator}{value}: KEY=VALUE is wanted; type: --set max_steps=100")
    return {key: value for key, _, value in pairs}


def plans(plan: dict[str, Any], more: dict[str, str], folder: Path) -> Iterator[TrainOptions]:
    """The options of every run."""
    for name, changes in plan["runs"].items():
        values = {**plan["common"], **(changes or {}), **more, "out": folder / str(name)}
        options = parse(values, f"run {name}")
        if options.evaluation_sequences == 0:
            raise UsageError(f"run {name}: evaluation_sequences 0 leaves nothing to tabulate; set it to 1 or more")
        yield options


def done(options: TrainOptions) -> dict[str, Any] | None:
    """provenance.json of a finished run with these options; None where there is none."""
    file = options.out / "provenance.json"
    if not file.is_file():
        return None
    record = json.loads(file.read_text(encoding="utf-8"))
    learnt = {**identity(options), "max_steps": options.max_steps}
    compared = learnt.keys() - {*NAMES} - options.of_others  # provenance holds NAMES without their folders
    fields, settings = TrainOptions.model_fields, record["settings"]  # an option that came later had its default
    same = all(settings.get(key, fields[key].default) == learnt[key] for key in compared)
    return record if same and record.get("figures") else None


def is_begun(options: TrainOptions) -> bool:
    """Whether a run with these options was interrupted: it has a state and no head."""
    folder = options.out / STATE_FOLDER
    has_state = latest_state(folder) is not None and not (options.out / "provenance.json").exists()
    return has_state and changed_option(read_state(folder), options) is None


def row(folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The row of a run; PTP heads have no joint distribution and no bits."""
    head, t1, t0 = record["head"], record["figures"]["t1"], record["figures"]["t0"]
    keys = ("variant", "lora_rank") if "variant" in head else ("circuit", "num_components")
    bits = {key: t1[f"{key}_bits"] / (t1.get("bytes_per_token") or 1.0) for key in BITS if f"{key}_bits" in t1}
    return {
        "name": folder.name,
        **{key.removeprefix("num_"): head[key] for key in keys},
        "parameters": parameters(folder),
        "steps": record["settings"]["max_steps"],
        "tokens_per_step": {"t1": t1["tokens_per_step"], "t0": t0["tokens_per_step"]},
        "standard_error": {"t1": t1["standard_error"], "t0": t0["standard_error"]},
        "per_position": {"t1": t1["per_position"], "t0": t0["per_position"]},
        **({"bits_per_byte": bits} if bits else {}),
        "command": record["command"],
    }


def parameters(folder: Path) -> int:
    """Numbers in a head's files."""
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            count += sum(math.prod(handle.get_slice(name).get_shape()) for name in handle.keys())  # noqa: SIM118
    return count


def table(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and lines."""
    lines = []
    for one in rows:
        results = [f"{one['tokens_per_step'][t]:.3f} ± {one['standard_error'][t]:.3f}" for t in ("t1", "t0")]
        bits = f"{one['bits_per_byte']['joint']:.3f}" if "bits_per_byte" in one else ""
        kind = [one.get("circuit") or one["variant"], str(one.get("components") or one["lora_rank"])]
        lines.append([one["name"], *kind, f"{one['parameters'] / 1e6:.2f}M", *results, bits])
    return ["run", "head", "r", "parameters", "tokens/step T=1", "tokens/step T=0", "bits per byte, joint"], lines


if __name__ == "__main__":
    sys.exit(main())
