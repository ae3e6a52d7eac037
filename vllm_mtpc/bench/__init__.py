"""`vllm-mtpc bench kernels|draft|serve`: a module for each, imported when its name was typed."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

WHAT = {
    "serve": "plain vLLM, peers and heads side by side",
    "draft": "what a draft costs, against a step of the target",
    "kernels": "kernels against their definition in PyTorch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    class Command(type(parser)):  # type: ignore[misc]
        def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
            if self.get_default("bench") is None:
                module = import_module(f"{__name__}.{self.prog.split()[-1]}_command")
                module.add_arguments(self)
                self.set_defaults(bench=module.run)
                self.description = module.__doc__
            return super().parse_known_args(args, namespace)

    commands = parser.add_subparsers(metavar="WHAT", required=True, parser_class=Command)
    for name, help_ in WHAT.items():
        commands.add_parser(name, help=help_)


def run(args: argparse.Namespace) -> int:
    return args.bench(args)
