"""`vllm-mtpc plot`: draw the acceptance of heads by position, from the results in their provenance.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_mtpc.checkpoint.locate import PROVENANCE_FILE, resolve_head
from vllm_mtpc.checkpoint.metadata import read_figures
from vllm_mtpc.errors import UsageError
from vllm_mtpc.plots.draw import plot_acceptance
from vllm_mtpc.report import check_folder

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("heads", nargs="+", metavar="HEAD", help="head folders or hub names")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the figures")


def run(args: argparse.Namespace) -> int:
    check_folder(args.out)
    files = plot_acceptance(dict(map(read, args.heads)), args.out)
    print("written: " + ", ".join(map(str, files)))
    return 0


def read(name: str) -> tuple[str, dict[str, Any]]:
    """Return a head's label (circuit, r, folder) and its results by temperature. Raises MtpcError without results."""
    from vllm_mtpc.checkpoint.load import read_circuit_config

    folder = resolve_head(name)
    config = read_circuit_config(folder)
    results = {key: found.model_dump() for key, found in read_figures(folder).items()}
    if not results:
        raise UsageError(
            f"{name}: its {PROVENANCE_FILE} holds no figures at T=1 or T=0; train it with evaluation_sequences above 0"
        )
    return f"{config.circuit.kind} r={config.num_components} {folder.resolve().name}", results
