"""The command line, `vllm-mtpc` or `python -m vllm_mtpc`.

A command is one line of COMMANDS: its help, and a module with `add_arguments(parser)` and `run(args) -> int`. Only the
module of the given command is imported, so `vllm-mtpc --help` imports neither torch nor vLLM.

Bad input ends with one line on stderr and exit code 1; a bug keeps its traceback. argparse reports command lines that
it cannot parse, with exit code 2.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Callable
from importlib import import_module

from vllm_mtpc import __version__
from vllm_mtpc.errors import SETUP, EngineFailed, MtpcError, printable

PROG = "vllm-mtpc"
# Errors of a file system that a user can fix, and how; any other OSError is a bug and keeps its traceback.
DISK = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions, or name another path,"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space"),
}
# Of errors that name a path, which the user gave.
PATHS = dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR), "correct that path")


COMMANDS = {  # help and module by name
    "play": ("show plain vLLM and a head side by side on a web page", "vllm_mtpc.play.command"),
    "train": ("train a head for a model from text", "vllm_mtpc.train.command"),
    "regenerate": ("generate training text with the target", "vllm_mtpc.batch.regenerate"),
    "cache": ("store a target's hidden states on disk", "vllm_mtpc.train.cache_command"),
    "eval": ("expected tokens/step of a head, without vLLM", "vllm_mtpc.eval.command"),
    "doctor": ("compare served acceptance with expected acceptance", "vllm_mtpc.eval.doctor"),
    "batch": ("complete files of prompts, on one engine or on Ray; resumable", "vllm_mtpc.batch.command"),
    "bench": ("compare plain vLLM, its own methods and heads", "vllm_mtpc.bench.serve_command"),
    "plot": ("draw heads or results of `bench serve`: acceptance, latency", "vllm_mtpc.plots.command"),
    "convert": ("convert a checkpoint of another project into a head", "vllm_mtpc.checkpoint.convert.command"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]

    def run() -> int:
        args = _parser(argv).parse_args(argv)
        return args.run(args)

    return guard(PROG, run)


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description="Probabilistic-circuit draft heads for vLLM.")
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    typed = next((word for word in argv if not word.startswith("-")), None)
    for name, (about, place) in COMMANDS.items():
        subparser = commands.add_parser(name, help=about, description=about)
        if name == typed:
            module = import_module(place)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def guard(program: str, call: Callable[[], int]) -> int:
    """Return the exit code of `call`; 1 after one line about bad input, 2 after the log of a failed engine."""
    try:
        return call()
    except KeyboardInterrupt:
        return 130
    except EngineFailed as error:  # several lines: the end of the log
        print(error, file=sys.stderr)
        return 2
    except MtpcError as error:
        message = str(error)
    except OSError as error:
        remedy = (DISK | PATHS if error.filename else DISK).get(error.errno or 0)
        if remedy is None:
            raise
        place = printable(str(error.filename or "a file"), 300)
        message = f"{place}: {error.strerror}; {remedy} and type the same again"
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("vllm_mtpc"):
            raise
        message = f"{error.name} is not installed; type: {SETUP}"
    print(f"{program}: error: {message}", file=sys.stderr)
    return 1
