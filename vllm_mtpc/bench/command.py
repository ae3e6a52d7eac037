"""`vllm-mtpc bench kernels|draft|serve`: a module for each, imported when its name was typed or help is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

WHAT = {
    "serve": ("plain vLLM, peers and heads side by side", "vllm_mtpc.bench.serve_command"),
    "draft": ("what a draft costs, against a step of the target", "vllm_mtpc.bench.draft_command"),
    "kernels": ("kernels against their definition in PyTorch", "vllm_mtpc.bench.kernels_command"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for name, (help_, place) in WHAT.items():
        module = import_module(place)
        subparser = commands.add_parser(name, help=help_, description=module.__doc__)
        module.add_arguments(subparser)
        subparser.set_defaults(bench=module.run)


def run(args: argparse.Namespace) -> int:
    return args.bench(args)
