"""Edits of a head's `config.json`, and the line it is then refused with."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.errors import HeadConfigError


def changed(values: dict[str, Any], path: str, value: Any = ...) -> dict[str, Any]:
    """A copy of `values` with the one at `path` ("a.b.0.c") set, or removed where no value is given."""
    values = copy.deepcopy(values)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = values
    for part in parents:
        place = place[part]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return values


def refusal(model: type[AnyHeadConfig], values: Any) -> str:
    """The one line that `model` refuses values with."""
    with pytest.raises(HeadConfigError) as caught:
        model.parse(values, "HEAD/config.json")
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert text.startswith("HEAD/config.json: ")
    return text
