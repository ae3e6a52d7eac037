"""`vllm-mtpc bench kernels|draft|serve`: a module for each; what serving costs is measured by `advise` too."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

WHAT = {
    "serve": "plain vLLM, peers and heads side by side",
    "draft": "what a draft costs, against a step of the target",
    "kernels": "kernels against their definition in PyTorch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="WHAT", required=True)
    for name, help_ in WHAT.items():
        module = import_module(f"{__name__}.{name}_command")
        subparser = commands.add_parser(name, help=help_, description=module.__doc__)
        module.add_arguments(subparser)
        subparser.set_defaults(bench=module.run)


def run(args: argparse.Namespace) -> int:
    return args.bench(args)
