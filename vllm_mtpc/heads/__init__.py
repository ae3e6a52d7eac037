"""Heads: hidden state -> circuit parameters. Adding one: a file here and its line in _HEADS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from vllm_mtpc.errors import HeadConfigError

if TYPE_CHECKING:
    from vllm_mtpc.config.mtpc import HeadConfig
    from vllm_mtpc.heads.base import Head

__all__ = ["HEADS", "OPTIONS", "build_head", "check_head", "check_head_name", "default_options", "needs_lm_head"]


class _Entry(NamedTuple):
    location: str
    options: Mapping[str, int]  # config field -> default; passed to the class by these names
    needs_lm_head: bool = False  # as the class says, known without importing it


_HEADS = {
    "linear": _Entry("vllm_mtpc.heads.linear:LinearHead", {}),
    "shared": _Entry("vllm_mtpc.heads.shared:SharedHead", {"expander_rank": 64}, True),
    "mlp": _Entry("vllm_mtpc.heads.mlp:MlpHead", {"expander_layers": 1}),
    "transformer": _Entry("vllm_mtpc.heads.transformer:TransformerHead", {"expander_layers": 1, "expander_heads": 8}),
}
HEADS = tuple(_HEADS)
OPTIONS = ("expander_rank", "expander_layers", "expander_heads")


def needs_lm_head(name: str) -> bool:
    """Whether head `name` reads the target's own lm_head."""
    return _HEADS[name].needs_lm_head


def check_head_name(name: str, *others: str) -> None:
    """Raise HeadConfigError unless `name` is a known head; `others` are allowed where the caller looks."""
    if name not in _HEADS:
        allowed = ", ".join((*_HEADS, *others))
        raise HeadConfigError(f"unknown head {name!r}; allowed: {allowed}; set head to one of them")


def check_head(name: str, hidden_size: int, options: Mapping[str, int | None]) -> None:
    """Raise HeadConfigError unless `name` is a known head and `options` (None: not given) are exactly its own."""
    check_head_name(name)
    own = _HEADS[name].options
    for key, value in options.items():
        if value is not None and key not in own:
            allowed = f"allowed: {', '.join(own)}" if own else "it has no such options"
            raise HeadConfigError(f"{key}={value} is not an option of head {name!r}; {allowed}; remove {key}")
        if value is None and key in own:
            raise HeadConfigError(f"head {name!r} needs {key}; add it to the config, for example {key}={own[key]}")
    heads = options.get("expander_heads")
    if heads is not None and hidden_size % heads:
        raise HeadConfigError(
            f"expander_heads={heads} does not divide hidden_size={hidden_size}; set expander_heads to a divisor, "
            f"for example {math.gcd(8, hidden_size)}"
        )


def default_options(name: str, hidden_size: int) -> dict[str, int]:
    """The options of head `name` where none are named; nothing for an unknown head."""
    options = dict(_HEADS[name].options) if name in _HEADS else {}
    if "expander_heads" in options:
        options["expander_heads"] = math.gcd(options["expander_heads"], hidden_size)
    return options


def build_head(config: HeadConfig) -> Head:
    """An untrained head for a config, on the current default device and dtype."""
    from pkgutil import resolve_name

    from vllm_mtpc.circuits import get_circuit

    circuit = get_circuit(config.circuit, config.window, config.num_components)
    options = {key: getattr(config, key) for key in OPTIONS}
    check_head(config.head, config.hidden_size, options)
    given = {key: value for key, value in options.items() if value is not None}
    return resolve_name(_HEADS[config.head].location)(circuit, config.vocab_size, config.hidden_size, **given)
