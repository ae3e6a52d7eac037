"""Errors at an entry point: bad input is one line on stderr and exit code 1, a fault of ours keeps its traceback.

A command line that cannot be parsed is argparse's: usage, one line, exit code 2.
"""

from __future__ import annotations

import argparse
import errno
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from vllm_mtpc.errors import EngineFailed, MtpcError, did_you_mean, install, printable

# Errors of a file system that a user can mend, and how; any other OSError is a fault of ours and keeps its traceback.
_RIGHTS, _ROOM = "get the right to read or write it, or name another place,", "free space"
DISK = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _RIGHTS) | dict.fromkeys(
    (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), _ROOM
)
# As above, where the error names what was not found: paths are typed by users.
NAMES = dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR), "correct that path")


class Parser(argparse.ArgumentParser):
    """A parser, as are those of its commands, that answers what is misspelled with what it is like."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
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
        remedy = (DISK | NAMES if error.filename else DISK).get(error.errno)
        if remedy is None:
            raise
        place = printable(str(error.filename or "a file"), 300)
        return _fail(program, f"{place}: {error.strerror}; {remedy} and type the same again")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("vllm_mtpc"):
            raise
        return _fail(program, f"{error.name} is not installed; type: {install('cpu')} (or .[cuda], or .[train])")
    except KeyboardInterrupt:
        return 130


def _fail(program: str, message: str) -> int:
    print(f"{program}: error: {message}", file=sys.stderr)
    return 1
