"""Errors a user sees: one line each, saying what was given, what is allowed and what to type."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import cast, get_args

from pydantic import BaseModel, ValidationError

ABBREVIATIONS = {"lr": "learning-rate", "batch-size": "windows-per-step"}  # of other trainers
_EXCEPTION = re.compile(r"(?:\(.*?\) |ERROR .*?\] )?[\w.]*(?:Error|Exception|Interrupt|Exit)\b")  # as logs have it


def printable(text: str, limit: int) -> str:
    """Text from a file or a user as one line for a terminal: nothing but printable characters, at most `limit` of them.

    Of a longer text the middle is left out: an error names the place first and what to type last.
    """
    if len(text) > limit:
        text = f"{text[: limit - limit // 2 - 5]} ... {text[-(limit // 2) :]}"
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(text.splitlines()))
    return shown if len(shown) <= limit else printable(shown, limit)  # escapes are longer than what they stand for


def first_line(error: BaseException) -> str:
    """What another library says of an error, its first line; the kind of error where it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class MtpcError(ValueError):
    """Base class of every error this package raises on bad input; always one line."""

    longest = 4000  # lists of what is allowed, which are ours

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, self.longest))


class HeadConfigError(MtpcError):
    """A head's `config.json`, or the request to build a head, is not valid."""

    longest = 480


class CheckpointError(MtpcError):
    """A head's folder or weight file is missing, damaged or of another shape."""

    longest = 480


class ServeConfigError(MtpcError):
    """`speculative_config` asks for something that cannot be served exactly."""


class UsageError(MtpcError):
    """What a command was given cannot be used: a flag, a file of data, a place for results."""


class EngineFailed(RuntimeError):
    """An engine's process ended before it had answered. The message ends with the last lines of its log."""

    @property
    def reason(self) -> str:  # Ray writes an attribute `cause` of its own
        """The last exception in the log, without its traceback and the advice behind it; else the last line."""
        lines = [line.strip() for line in str(self).splitlines() if line.strip()]
        raised = [number for number, line in enumerate(lines) if _EXCEPTION.match(line)]
        if not raised:
            return lines[-1][:300]
        said = [line for line in lines[raised[-1] :] if not line.startswith("For further information")]
        return " ".join(said[: 3 if "validation error" in said[0] else 1])[:300]  # pydantic's goes on below


# What to type where vLLM or torch is missing. `pip install '.[cpu]'` brings a vLLM that does not start by itself.
SETUP = "scripts/setup.sh in the checkout of vllm_mtpc: it makes .venv with vLLM and all of this package"


def install(extra: str) -> str:
    """What to type for an extra of this package, which is installed from its checkout and is on no index."""
    return f"pip install '.[{extra}]' in the checkout of vllm_mtpc"


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """What an error says at its end of a misspelled word: the allowed one it is like; nothing where there is none."""
    names = {name.strip("-").replace("_", "-"): name for name in allowed}
    meant = names.get(ABBREVIATIONS.get(word.strip("-").replace("_", "-"), ""))
    found = [meant] if meant else difflib.get_close_matches(word, list(names.values()), 1)
    return f"; did you mean {found[0]}?" if found else ""


def one_line(error: ValidationError, allowed: list[str] | type[BaseModel]) -> str:
    """The first problem of a pydantic error in one line, unknown keys answered with the allowed ones.

    `allowed` lists them, or is the model that was validated; nested keys are then looked up in it.
    """
    problem = error.errors()[0]
    key = printable(".".join(str(part) for part in problem["loc"]), 100)
    if problem["type"] == "extra_forbidden":
        keys = allowed if isinstance(allowed, list) else _keys_beside(problem["loc"], allowed)
        hint = did_you_mean(str(problem["loc"][-1]), keys)
        return f"unknown key {key!r}; allowed keys: {', '.join(sorted(keys))}; remove it or correct its name{hint}"
    if problem["type"] == "missing":
        return f"key {key!r} is missing; every key is explicit in this format: add it"
    message = problem["msg"].removeprefix("Value error, ")
    given = printable(repr(problem["input"]), 100)
    return f"key {key!r} = {given}: {message}" if key else message  # without a key: about several


def _keys_beside(location: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """Names of the fields at the place in `model` where a pydantic location points to."""
    for part in location[:-1]:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            model = cast(type[BaseModel], next(iter(get_args(annotation)), annotation))  # list[Model] or Model
    return list(model.model_fields)
