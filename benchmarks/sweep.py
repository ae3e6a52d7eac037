"""Several training runs side by side: ``python -m benchmarks.sweep FILE --runs FOLDER [--json FILE]``.

FILE is YAML: ``title``, ``common`` (options of ``vllm-mtpc train``) and ``runs`` (name: what differs). Every run is a
folder in FOLDER; a finished one with the same options is not trained again. The table is made
from the runs' provenance.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from safetensors import safe_open

from vllm_mtpc.cli import guard
from vllm_mtpc.engine import provenance
from vllm_mtpc.engine.server import DEFINITIONS
from vllm_mtpc.files import read_yaml
from vllm_mtpc.report import check_file, print_table, write_json
from vllm_mtpc.train.options import STATE_FOLDER, TrainOptions, parse
from vllm_mtpc.train.run import train, with_defaults
from vllm_mtpc.train.state import NAMES, identity, latest_state

PROG = "python -m benchmarks.sweep"
HEADER = ("run", "parameters", "tokens/step T=1", "tokens/step T=0", "bits per byte, joint")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE", help="YAML: title, common, runs")
    parser.add_argument("--runs", type=Path, required=True, metavar="FOLDER", help="where the heads are written")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="options for every run")
    args = parser.parse_args(arguments)
    return guard(PROG, lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Train missing runs and print the table."""
    check_file(args.json)
    plan, more = read_yaml(args.file), dict(word.split("=", 1) for word in args.set)
    wanted = [
        with_defaults(parse({**plan["common"], **(changes or {}), **more, "out": args.runs / name}, f"run {name}"))
        for name, changes in plan["runs"].items()
    ]
    rows = []
    for options in wanted:
        if done(options) is None:
            print(f"--- {options.out.name}", flush=True)
            is_begun = latest_state(options.out / STATE_FOLDER) is not None
            train(options.model_copy(update={"resume": is_begun}))
        rows.append(row(options.out))
    print_table(plan["title"], HEADER, [line(one) for one in rows])
    if args.json:
        values = {"title": plan["title"], "definitions": DEFINITIONS.splitlines(), **provenance.collect(), "rows": rows}
        write_json(args.json, values)
    return 0


def done(options: TrainOptions) -> dict[str, Any] | None:
    """Return provenance.json of a finished and measured run with these options; None where there is none."""
    file = options.out / "provenance.json"
    if not file.is_file():
        return None
    record = json.loads(file.read_text(encoding="utf-8"))
    learnt = {**identity(options), "max_steps": options.max_steps}
    compared = learnt.keys() - {*NAMES} - options.of_others  # provenance holds NAMES without their folders
    fields, settings = TrainOptions.model_fields, record["settings"]  # an option that came later had its default
    same = all(settings.get(key, fields[key].default) == learnt[key] for key in compared)
    return record if same and record.get("figures") else None


def row(folder: Path) -> dict[str, Any]:
    """Return the row of a run; PTP heads have no joint distribution and no bits."""
    record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    head, both = record["head"], {t: record["figures"][t] for t in ("t1", "t0")}
    keys = ("variant", "lora_rank") if "variant" in head else ("circuit", "num_components")
    per_token = both["t1"].get("bytes_per_token") or 1.0
    bits = {key: both["t1"][f"{key}_bits"] / per_token for key in ("target", "joint") if f"{key}_bits" in both["t1"]}
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            count += sum(math.prod(handle.get_slice(name).get_shape()) for name in handle.keys())  # noqa: SIM118
    return {
        "name": folder.name,
        **{key.removeprefix("num_"): head[key] for key in keys},
        "parameters": count,
        "steps": record["settings"]["max_steps"],
        **{
            key: {t: found[key] for t, found in both.items()}
            for key in ("tokens_per_step", "standard_error", "per_position")
        },
        **({"bits_per_byte": bits} if bits else {}),
        "command": record["command"],
    }


def line(one: dict[str, Any]) -> list[str]:
    """Format a row of the table."""
    results = [f"{one['tokens_per_step'][t]:.3f} ± {one['standard_error'][t]:.3f}" for t in ("t1", "t0")]
    bits = f"{one['bits_per_byte']['joint']:.3f}" if "bits_per_byte" in one else ""
    return [one["name"], f"{one['parameters'] / 1e6:.2f}M", *results, bits]


if __name__ == "__main__":
    sys.exit(main())
