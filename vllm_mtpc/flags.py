"""Command-line flags from a pydantic model; flags that are not given are left out of the namespace."""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Collection
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, BeforeValidator

from vllm_mtpc.errors import UsageError


def _parse_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f'not JSON ({error}); type it as \'{{"key": "value"}}\'') from None


JsonDict = Annotated[dict[str, Any], BeforeValidator(_parse_json)]  # a mapping, or JSON of it


def add_flags(
    parser: argparse.ArgumentParser, model: type[BaseModel], required: bool = True, only: Collection[str] = ()
) -> None:
    """Add a flag for every field of a model, or `only` for some.

    The model's `groups` are titles of the help by the first field of each group. Fields of the model are not `required`
    if they may come from another source, such as a file.
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
    """Return the fields of `model` that were given."""
    return {name: value for name, value in vars(args).items() if name in model.model_fields}


def _kind(annotation: Any) -> Any:
    """Return the type of a field without `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next(part for part in get_args(annotation) if part is not type(None))
    return annotation


def json_object(text: str) -> dict[str, Any]:
    """Return the object of a JSON option, a `type` of argparse."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise UsageError if one of these options is below 1."""
    for name in names:
        if (value := getattr(args, name)) < 1:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} {value}: allowed are 1 and above; give a positive number")
