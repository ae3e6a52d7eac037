"""The command line, `vllm-mtpc` or `python -m vllm_mtpc`.

A command is one line of COMMANDS: its help, and a module with `add_arguments(parser)` and `run(args) -> int`. Only the
module of the given command is imported, so `vllm-mtpc --help` imports neither torch nor vLLM.

Exit codes: 2 for a usage error, 1 for a failure, such as a damaged head or an engine that ended. Both print one line; a
bug keeps its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from vllm_mtpc import __version__
from vllm_mtpc.errors import SETUP, EngineFailed, MtpcError, UsageError, printable

PROG = "vllm-mtpc"
# Errors of a file system that a user can fix, and how; any other OSError is a bug and keeps its traceback.
DISK = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "change its permissions, or name another path,"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space"),
}
# Of errors that name a path, which the user gave.
PATHS = dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR), "correct that path")


COMMANDS = {  # help and module by name
    "train": ("train a head for a model from text", "vllm_mtpc.train.command"),
    "regenerate": ("generate training text with the target", "vllm_mtpc.regenerate.command"),
    "cache": ("store a target's hidden states on disk", "vllm_mtpc.train.cache_command"),
    "eval": ("expected tokens/step of a head, without vLLM", "vllm_mtpc.eval.command"),
    "doctor": ("compare served acceptance with expected acceptance", "vllm_mtpc.eval.doctor"),
    "bench": ("compare plain vLLM, its own methods and heads", "vllm_mtpc.bench.serve_command"),
    "convert": ("convert a checkpoint of another project into a head", "vllm_mtpc.checkpoint.convert.command"),
}


# Options of vLLM and transformers by the names that commands of this package give them
OPTIONS = {"--model": "--target", "--output": "--out", "--output-dir": "--out", "--dataset": "--data"}
ELSEWHERE = {"serve": "vllm serve HEAD", "batch": "vllm run-batch", "play": "python -m examples.play"}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if argv[0] == "help":
        argv = [*argv[1:], "--help"]

    def run() -> int:
        args = _parser(argv).parse_args(argv)
        return args.run(args)

    return guard(PROG, run)


class Parser(argparse.ArgumentParser):
    """A parser with the habits of vLLM's: `_` for `-` in options, `--help=WORD`; an error is one line."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        args = [with_dashes(word) for word in (sys.argv[1:] if args is None else args)]
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:  # an error of this command, not of the parser of all commands
            self.error(f"unknown argument {unknown[0]}{self.suggest(unknown[0].partition('=')[0])}")
        return known, unknown

    def suggest(self, option: str) -> str:
        options = list(self._option_string_actions)
        near = [OPTIONS[option]] if OPTIONS.get(option) in options else difflib.get_close_matches(option, options, 1)
        return f" (did you mean {near[0]}?)" if near else ""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; type {self.prog} --help for all that is allowed\n")


def with_dashes(option: str) -> str:
    """Return an option with `-` for `_` in its name, as vLLM accepts it; `--help=WORD` is `--help`."""
    name, equals, value = option.partition("=") if option.startswith("--") else ("", "", option)
    return name if name == "--help" else f"{name.replace('_', '-')}{equals}{value}"


def _parser(argv: list[str]) -> Parser:
    parser = Parser(prog=PROG, description="Probabilistic-circuit draft heads for vLLM.")
    parser.add_argument("-v", "-V", "--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    typed = next((word for word in argv if not word.startswith("-")), None)
    if typed not in {None, *COMMANDS}:
        near = difflib.get_close_matches(str(typed), COMMANDS, 1)
        meant = ELSEWHERE.get(str(typed)) or (near[0] if near else "")
        parser.error(f"unknown command {typed}{meant and f' (did you mean {meant}?)'}")
    for name, (about, place) in COMMANDS.items():
        subparser = commands.add_parser(name, help=about, description=about)
        if name == typed:
            module = import_module(place)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def guard(program: str, call: Callable[[], int]) -> int:
    """Return the exit code of `call`: 2 after a usage error, 1 after a failure."""
    try:
        return call()
    except KeyboardInterrupt:
        return 130
    except EngineFailed as error:  # several lines: the end of the log
        print(error, file=sys.stderr)
        return 1
    except UsageError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
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
