"""`vllm-mtpc bench serve`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from vllm_mtpc.bench import serve_command

    commands = parser.add_subparsers(metavar="WHAT", required=True)
    about = "compare plain vLLM, its own methods and heads on this machine"
    serve_command.add_arguments(commands.add_parser("serve", help=about, description=serve_command.__doc__))


def run(args: argparse.Namespace) -> int:
    from vllm_mtpc.bench import serve_command

    return serve_command.run(args)
