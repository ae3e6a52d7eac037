"""Heads: hidden state -> circuit parameters. Adding one: a file here and its entry in HEADS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from vllm_mtpc.errors import HeadConfigError

if TYPE_CHECKING:
    from vllm_mtpc.heads.base import Head


class Option(NamedTuple):
    """An option of a head. It is an argument of the class; a field of HeadConfig and a flag of `vllm-mtpc train`, of
    the type of `default`, follow from it. is_optional: a config may leave it out, which means the default."""

    name: str
    default: Any
    help: str
    ge: float | None = 1
    le: float | None = None
    divides_hidden_size: bool = False
    is_optional: bool = False


class Entry(NamedTuple):
    """A head, known without importing it."""

    location: str
    options: tuple[Option, ...] = ()
    needs_lm_head: bool = False  # as the class says


MAX_WIDTH = 2**17  # beyond any model
RANK = Option("expander_rank", 64, "width of the low-rank expander", le=MAX_WIDTH)
LAYERS = Option("expander_layers", 1, "blocks of the expander", le=64)
ATTENTION_HEADS = Option("expander_heads", 8, "attention heads of a block", le=MAX_WIDTH, divides_hidden_size=True)
TOKENS = Option("token_rank", 0, "rank of what the token before adds to a leaf; 0: nothing", 0, 4096, is_optional=True)
COMPONENTS = Option(
    "component_rank", 0, "rank of what tells components apart behind one row of the lm_head; 0: r rows",
    0, MAX_WIDTH, is_optional=True,
)  # fmt: skip
SUPPORT = Option("support", 0, "tokens a draft is one of, the likeliest of the base; 0: all", 0, is_optional=True)

HEADS = {
    "linear": Entry("vllm_mtpc.heads.linear:LinearHead", (TOKENS,)),
    "shared": Entry("vllm_mtpc.heads.shared:SharedHead", (RANK, COMPONENTS, SUPPORT, TOKENS), needs_lm_head=True),
    "mlp": Entry("vllm_mtpc.heads.linear:MlpHead", (LAYERS, TOKENS)),
    "transformer": Entry("vllm_mtpc.heads.linear:TransformerHead", (LAYERS, ATTENTION_HEADS, TOKENS)),
}


def head_options() -> dict[str, Option]:
    """The options of all heads, by name."""
    return {option.name: option for entry in HEADS.values() for option in entry.options}


def option_fields() -> dict[str, Any]:
    """Every option of a head as a field for pydantic's create_model; None: the head has it not, or its default."""
    fields = {}
    for name, option in head_options().items():
        owners = [head for head, entry in HEADS.items() if option in entry.options]
        shown = "every head" if len(owners) == len(HEADS) else f"head {' or '.join(owners)}"
        divisor = ", or its greatest common divisor with D" if option.divides_hidden_size else ""
        text = f"{shown}: {option.help} (default: {option.default}{divisor})"
        fields[name] = type(option.default) | None, Field(None, ge=option.ge, le=option.le, description=text)
    return fields


def needs_lm_head(name: str) -> bool:
    """Whether head `name` reads the target's own lm_head."""
    return HEADS[name].needs_lm_head


def check_head_name(name: str, *others: str) -> None:
    """Raise HeadConfigError unless `name` is a known head; `others` are allowed where the caller looks."""
    if name not in HEADS:
        allowed = ", ".join((*HEADS, *others))
        raise HeadConfigError(f"unknown head {name!r}; allowed: {allowed}; set head to one of them")


def check_head(name: str, hidden_size: int, options: Mapping[str, Any]) -> None:
    """Raise HeadConfigError unless `name` is a known head and `options` (None: not given) are exactly its own."""
    check_head_name(name)
    own = {option.name: option for option in HEADS[name].options}
    for key, value in options.items():
        if value is not None and key not in own:
            allowed = f"allowed: {', '.join(own)}" if own else "it has no such options"
            raise HeadConfigError(f"{key}={value} is not an option of head {name!r}; {allowed}; remove {key}")
        if value is None and key in own and not own[key].is_optional:
            example = f"{key}={own[key].default}"
            raise HeadConfigError(f"head {name!r} needs {key}; add it to the config, for example {example}")
        if value is not None and own[key].divides_hidden_size and hidden_size % value:
            raise HeadConfigError(
                f"{key}={value} does not divide hidden_size={hidden_size}; set {key} to a divisor, for example "
                f"{math.gcd(own[key].default, hidden_size)}"
            )


def check_support(vocab_size: int, num_components: int, support: int | None, component_rank: int | None) -> None:
    """Raise HeadConfigError for a support beyond the vocabulary, or where components have no base in common."""
    if support and support > vocab_size:
        raise HeadConfigError(f"support={support}: allowed are 1 to vocab_size={vocab_size}, or 0 (off); lower it")
    if support and num_components > 1 and not component_rank:
        raise HeadConfigError(
            f"support={support} with num_components={num_components} and no component_rank: the likeliest tokens are "
            "those of the one row that components share; set component_rank, for example component_rank=16"
        )


def default_options(name: str, hidden_size: int) -> dict[str, Any]:
    """The options of head `name` that a new config says where none are named; nothing for an unknown head."""
    options = HEADS[name].options if name in HEADS else ()
    return {
        option.name: math.gcd(option.default, hidden_size) if option.divides_hidden_size else option.default
        for option in options
        if not option.is_optional
    }


def build_head(config: Any) -> Head:
    """An untrained head for a HeadConfig, on the current default device and dtype."""
    from pkgutil import resolve_name

    from vllm_mtpc.circuits import get_circuit

    circuit = get_circuit(config.circuit, config.window, config.num_components)
    given = {option.name: getattr(config, option.name) for option in HEADS[config.head].options}
    options = {name: value for name, value in given.items() if value is not None}
    return resolve_name(HEADS[config.head].location)(circuit, config.vocab_size, config.hidden_size, **options)
