"""The command line, `vllm-mtpc` or `python -m vllm_mtpc`.

A command is one line of COMMANDS: its help, and a module with `add_arguments(parser)` and `run(args) -> int`.
Only the module of the command that was typed is imported, so `vllm-mtpc --help` loads neither torch nor vLLM.

Bad input is one line on stderr and exit code 1, a fault of ours keeps its traceback. A command line that cannot be
parsed is argparse's: usage, one line, exit code 2.
"""

from __future__ import annotations

import argparse
import errno
import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from vllm_mtpc import __version__
from vllm_mtpc.errors import SETUP, EngineFailed, MtpcError, did_you_mean, printable

PROG = "vllm-mtpc"
# Errors of a file system that a user can mend, and how; any other OSError is a fault of ours and keeps its traceback.
_RIGHTS, _ROOM = "get the right to read or write it, or name another place,", "free space"
DISK = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _RIGHTS) | dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _ROOM
)
# As above, where the error names what was not found: paths are typed by users.
NAMES = dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR), "correct that path")


class Command(NamedTuple):
    help: str
    module: str


COMMANDS = {
    "play": Command("a page on which plain vLLM and a head race, step by step", "vllm_mtpc.play.command"),
    "train": Command("train a head for a model, from text to a folder that can be served", "vllm_mtpc.train.command"),
    "regenerate": Command("have the target write the text a head is trained on", "vllm_mtpc.batch.regenerate"),
    "cache": Command("keep a target's hidden states on disk", "vllm_mtpc.train.cache_command"),
    "eval": Command("expected tokens/step of a head, without vLLM", "vllm_mtpc.eval.command"),
    "doctor": Command("compare what vLLM serves with what was expected", "vllm_mtpc.eval.doctor"),
    "generate": Command("continue a prompt: plain, unverified, or as it is served", "vllm_mtpc.eval.generate"),
    "batch": Command("answer files of prompts, on one engine or on Ray, resumed", "vllm_mtpc.batch.command"),
    "bench": Command("measure plain vLLM, peers and heads on one machine", "vllm_mtpc.bench"),
    "plot": Command("draw heads or results of `bench serve`: acceptance, latency", "vllm_mtpc.plots.command"),
    "inspect": Command("show what a head is and check its weights", "vllm_mtpc.eval.inspect_command"),
    "push": Command("publish a head on the hub", "vllm_mtpc.publish.command"),
    "convert": Command("make a head of a checkpoint others trained", "vllm_mtpc.checkpoint.convert.command"),
    "token-heads": Command("make a head of the prediction heads a target has", "vllm_mtpc.checkpoint.token_heads"),
}


class Parser(argparse.ArgumentParser):
    """A parser, as are those of its commands, that answers what is misspelled with what it is like."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = super().parse_known_args(args, namespace)
        if rest:  # refused here, where the options of a command are known
            option = next((word for word in rest if word.startswith("-")), "").partition("=")[0]
            hint = did_you_mean(option, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)$", message):
            message += did_you_mean(choice[1], re.findall(r"[^\s,']+", choice[2]))
        super().error(message)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    argv = (sys.argv[1:] if argv is None else argv) or ["--help"]

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


def guard(program: str, call: Callable[[], int]) -> int:
    """The exit code of `call`, or 1 after one line that says what is wrong; 2 where an engine has failed."""
    try:
        return call()
    except MtpcError as error:
        return _fail(program, str(error))
    except EngineFailed as error:  # several lines: the end of its log
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        remedy = (DISK | NAMES if error.filename else DISK).get(error.errno or 0)
        if remedy is None:
            raise
        place = printable(str(error.filename or "a file"), 300)
        return _fail(program, f"{place}: {error.strerror}; {remedy} and type the same again")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("vllm_mtpc"):
            raise
        return _fail(program, f"{error.name} is not installed; type: {SETUP}")
    except KeyboardInterrupt:
        return 130


def _fail(program: str, message: str) -> int:
    print(f"{program}: error: {message}", file=sys.stderr)
    return 1
