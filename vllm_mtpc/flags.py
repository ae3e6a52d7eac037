"""Command-line flags from a pydantic model: a field is a flag, and what is not typed stays out of the namespace."""

from __future__ import annotations

import argparse
import types
from collections.abc import Collection
from typing import Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel

from vllm_mtpc.errors import UsageError


def add_flags(
    parser: argparse.ArgumentParser, model: type[BaseModel], required: bool = True, only: Collection[str] = ()
) -> None:
    """A flag for every field of `model`, or for `only` some of them.

    `required=False` leaves required fields to another source, such as a file. `model.groups`: titles of the help
    by the first field of each group.
    """
    titles, part = getattr(model, "groups", {}), cast(Any, parser)
    parts = {first: parser.add_argument_group(title) for first, title in titles.items()}
    for name, field in model.model_fields.items():
        part = parts.get(name, part)
        if only and name not in only:
            continue
        kind = _kind(field.annotation)
        shown = "" if field.is_required() or field.default in (None, [], {}, False) else f" (default: {field.default})"
        what: dict[str, Any] = {"help": f"{field.description}{shown}".replace("%", "%%"), "default": argparse.SUPPRESS}
        if kind is bool:
            what["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is list:
            what |= {"nargs": "+", "metavar": name.split("_")[-1].upper()}
        elif get_origin(kind) is Literal:
            what |= {"choices": get_args(kind), "type": type(get_args(kind)[0])}
        else:  # strings: the model converts them, and its messages name the field
            what["metavar"] = {int: "N", float: "FLOAT"}.get(kind, name.split("_")[-1].upper())
        if required and field.is_required():
            what["required"] = True
        part.add_argument(f"--{name.replace('_', '-')}", **what)


def typed(args: argparse.Namespace, model: type[BaseModel]) -> dict[str, Any]:
    """The fields of `model` that were typed."""
    return {name: value for name, value in vars(args).items() if name in model.model_fields}


def _kind(annotation: Any) -> Any:
    """The type of a field, without its `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(part for part in get_args(annotation) if part is not type(None))
    return annotation


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raises UsageError unless every one of these that is given is 1 or more."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value}: allowed are 1 and above; give it a positive number")
