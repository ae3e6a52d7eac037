"""Errors that users see: one line each, with the value, what is allowed and what to type."""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast, get_args

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)
_EXCEPTION = re.compile(r"(?:\(.*?\) |ERROR .*?\] )?[\w.]*(?:Error|Exception|Interrupt|Exit)\b")  # in logs


def printable(text: str, limit: int) -> str:
    """Return text from a file or a user as one line of at most `limit` printable characters.

    The middle of a longer text is left out: an error names the place first and what to type last.
    """
    if len(text) > limit:
        text = f"{text[: limit - limit // 2 - 5]} ... {text[-(limit // 2) :]}"
    shown = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(text.splitlines()))
    return shown if len(shown) <= limit else printable(shown, limit)  # escapes are longer than their characters


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error; its class if it has no message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class MtpcError(ValueError):
    """Base class of errors about bad input; always one line."""

    longest = 4000  # with lists of allowed values

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, self.longest))


class HeadConfigError(MtpcError):
    """A head's `config.json`, or the request to build a head, is not valid."""

    longest = 480


class CheckpointError(MtpcError):
    """A head's folder or weight file is missing, damaged or of another shape."""

    longest = 480


class ServeConfigError(MtpcError):
    """`speculative_config` has options that cannot be served exactly."""


class UsageError(MtpcError):
    """An option, a data file or an output path of a command cannot be used."""


class EngineFailed(RuntimeError):
    """An engine's process ended before it answered. The message ends with the last lines of its log."""

    @property
    def reason(self) -> str:  # Ray writes an attribute `cause` of its own
        """The last exception in the log, without its traceback and the advice after it; else the last line."""
        lines = [line.strip() for line in str(self).splitlines() if line.strip()]
        raised = [number for number, line in enumerate(lines) if _EXCEPTION.match(line)]
        if not raised:
            return lines[-1][:300]
        shown = [line for line in lines[raised[-1] :] if not line.startswith("For further information")]
        return " ".join(shown[: 3 if "validation error" in shown[0] else 1])[:300]  # pydantic's has three lines


# How to install vLLM and torch: the vLLM of `pip install '.[cpu]'` does not start by itself.
SETUP = "scripts/setup.sh in the checkout of vllm_mtpc: it makes .venv with vLLM and all of this package"


def install(extra: str) -> str:
    """Return the command that installs an extra of this package, which is on no package index."""
    return f"pip install '.[{extra}]' in the checkout of vllm_mtpc"


def validate(model: type[Model], values: Any, kind: type[MtpcError], place: str = "", remedy: str = "") -> Model:
    """Return `values` as a `model`; raises `kind`, in one line from `place` to `remedy`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise kind(f"{place}{one_line(error, model)}{remedy}") from None


def one_line(error: ValidationError, allowed: list[str] | type[BaseModel]) -> str:
    """Return the first problem of a pydantic error in one line; `allowed`: names of the allowed keys, or the model."""
    problem = error.errors()[0]
    key = printable(".".join(map(str, problem["loc"])), 100)
    if problem["type"] == "extra_forbidden":
        names = allowed if isinstance(allowed, list) else _field_names(allowed, problem["loc"])
        return f"unknown key {key!r}; allowed keys: {', '.join(sorted(names))}; remove it or correct its name"
    if problem["type"] == "missing":
        return f"key {key!r} is missing; every key is explicit in this format: add it"
    message = problem["msg"].removeprefix("Value error, ")
    given = printable(repr(problem["input"]), 100)
    return f"key {key!r} = {given}: {message}" if key else message  # without a key: about several


def _field_names(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the fields of the model that is nested in `model` at `location`, without its last part."""
    for part in location[:-1]:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            model = cast(type[BaseModel], next(iter(get_args(annotation)), annotation))  # list[Model] or Model
    return list(getattr(model, "model_fields", model.__annotations__))  # a TypedDict has annotations alone
