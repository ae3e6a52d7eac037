"""The command line, `vllm-mtpc` or `python -m vllm_mtpc`.

A command is one line of COMMANDS: its help, and a module with `add_arguments(parser)` and `run(args) -> int`.
Only the module of the command that was typed is imported, so `vllm-mtpc --help` loads neither torch nor vLLM.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import NamedTuple

from vllm_mtpc import __version__
from vllm_mtpc.guard import Parser, guard

PROG = "vllm-mtpc"


class Command(NamedTuple):
    help: str
    module: str


COMMANDS = {
    "train": Command("train a head for a model, from text to a folder that can be served", "vllm_mtpc.train.command"),
    "regenerate": Command("have the target write the text a head is trained on", "vllm_mtpc.batch.regenerate"),
    "cache": Command("keep a target's hidden states on disk", "vllm_mtpc.train.cache_command"),
    "eval": Command("expected tokens/step of a head, without vLLM", "vllm_mtpc.eval.command"),
    "doctor": Command("compare what vLLM serves with what was expected", "vllm_mtpc.eval.doctor"),
    "generate": Command("continue a prompt: plain, unverified, or as it is served", "vllm_mtpc.eval.generate"),
    "batch": Command("answer files of prompts, on one engine or on Ray, resumed", "vllm_mtpc.batch.command"),
    "bench": Command("measure: plain vLLM, peers and heads; drafts; kernels", "vllm_mtpc.bench"),
    "advise": Command("choose head, drafts and schedule from measured costs", "vllm_mtpc.bench.advise"),
    "plot": Command("draw heads or results of `bench serve`: acceptance, latency", "vllm_mtpc.plots.command"),
    "inspect": Command("show what a head is and check its weights", "vllm_mtpc.eval.inspect_command"),
    "convert": Command("make a head of a checkpoint of the papers' authors", "vllm_mtpc.checkpoint.convert.command"),
    "token-heads": Command("make a head of the prediction heads a target has", "vllm_mtpc.checkpoint.token_heads"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; bad input is one line on stderr and exit code 1."""
    argv = sys.argv[1:] if argv is None else argv

    def run() -> int:
        args = _parser(argv).parse_args(argv)
        return args.run(args)

    return guard(PROG, run)


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = Parser(prog=PROG, description="Probabilistic-circuit draft heads for vLLM.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    typed = next((word for word in argv if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help, description=command.help)
        if name == typed:
            module = import_module(command.module)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser
