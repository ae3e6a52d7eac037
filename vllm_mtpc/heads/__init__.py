"""Heads: hidden state -> circuit parameters. Adding one: a file here and its entry in HEADS."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from vllm_mtpc.errors import HeadConfigError

if TYPE_CHECKING:
    from vllm_mtpc.heads.base import Head


class Option(NamedTuple):
    """An option of a head: an argument of its class, a field of HeadConfig and a flag of `vllm-mtpc train`."""

    name: str
    default: Any  # its type is that of the field and the flag
    help: str
    ge: float | None = 1  # bounds; of a list those of its numbers
    le: float | None = None
    is_optional: bool = False  # a config may omit it, which means the default
    of_target: Callable[[Mapping[str, Any]], Any] | None = None  # the default, from the target's config; None: unknown


class Entry(NamedTuple):
    """The registry entry of a head, which does not import it."""

    location: str  # "module:class"
    options: tuple[Option, ...] = ()
    needs_lm_head: bool = False  # as `Head.needs_lm_head`


MAX_WIDTH = 2**17  # larger than in any model: bounds reject a damaged config
MAX_LIST = 16  # entries of a list
FEW_IDS = 2000  # largest vocabulary with unembeddings of a head's own and full components by default
RANK = Option("expander_rank", 64, "width of the low-rank expander", le=MAX_WIDTH)
TOKENS = Option(
    "token_rank", 0, "rank of the term that the token before adds to a leaf; 0: none", 0, 4096, is_optional=True
)
COMPONENTS = Option(  # the trainer applies `of_target` to new heads of several components
    "component_rank", 0,
    "rank of the differences between components that share one row of the lm_head; 0: r rows; 16 above 2,000 ids",
    0, MAX_WIDTH, is_optional=True, of_target=lambda target: 16 if target["vocab_size"] > FEW_IDS else 0,
)  # fmt: skip


def _first_of(*names: str) -> Callable[[Mapping[str, Any]], Any]:
    """A function that returns the first of these numbers in a target's config."""
    return lambda target: next((target[name] for name in names if target.get(name)), None)


def _head_dim(target: Mapping[str, Any]) -> int | None:
    heads, size = target.get("num_attention_heads"), target.get("hidden_size")
    return target.get("head_dim") or (size // heads if heads and size else None)


def _theta(target: Mapping[str, Any]) -> float | None:
    theta = (target.get("rope_parameters") or target).get("rope_theta")
    return float(theta) if theta else None


def _aux_layers(target: Mapping[str, Any]) -> list[int] | None:
    """Up to five layers from the second to the third last, as DFlash reads them; all of a small target."""
    layers = target.get("num_hidden_layers")
    if not layers:
        return None
    first, last = (2, layers - 2) if layers > 4 else (1, layers)
    steps = min(MAX_AUX, last - first + 1) - 1
    return [first + round(step * (last - first) / max(1, steps)) for step in range(steps + 1)]


MAX_AUX = 5  # default number of the target's layers that a backbone reads
_QUERY_HEADS = _first_of("num_attention_heads")
_KEY_HEADS = _first_of("num_key_value_heads", "num_attention_heads")
_MLP_WIDTH = _first_of("intermediate_size")
BACKBONE = (
    Option("backbone_layers", 2, "draft layers", le=5),
    Option("backbone_heads", 8, "attention heads of a draft layer", le=MAX_WIDTH, of_target=_QUERY_HEADS),
    Option("backbone_kv_heads", 8, "key and value heads of a draft layer", le=MAX_WIDTH, of_target=_KEY_HEADS),
    Option("backbone_head_dim", 64, "width of an attention head, even", ge=2, le=MAX_WIDTH, of_target=_head_dim),
    Option("backbone_width", 1024, "width of a draft layer's MLP", le=MAX_WIDTH, of_target=_MLP_WIDTH),
    Option("backbone_theta", 10000.0, "base of the rotary positions", of_target=_theta),
    Option("backbone_eps", 1e-6, "of the norms", ge=0, le=1, of_target=_first_of("rms_norm_eps")),
    Option(
        "aux_hidden_state_layer_ids", [1], "the target's layers that are read, counted from 1; 0: the embeddings",
        ge=0, le=4096, of_target=_aux_layers,
    ),
    Option(
        "sample_from_anchor", False,
        "a query predicts the next token (DSpark), not the token of its own position (DFlash)", ge=None,
    ),
    COMPONENTS,
    TOKENS,
)  # fmt: skip

HEADS = {
    "linear": Entry("vllm_mtpc.heads.linear:LinearHead", (TOKENS,)),
    "shared": Entry("vllm_mtpc.heads.shared:SharedHead", (RANK, COMPONENTS, TOKENS), needs_lm_head=True),
    "backbone": Entry("vllm_mtpc.heads.backbone:BackboneHead", BACKBONE, needs_lm_head=True),
    "hosted": Entry("vllm_mtpc.heads.hosted:HostedHead", (RANK, COMPONENTS, TOKENS), needs_lm_head=True),
    "product": Entry("vllm_mtpc.heads.product:ProductHead", (RANK, COMPONENTS, TOKENS), needs_lm_head=True),
}
HOSTED = ("hosted", "product")  # heads on the states of a drafter that vLLM serves


def default_head(vocab_size: int) -> str:
    """Return the head that is trained where none is named: for many ids drafts cost less with the target's lm_head."""
    return "shared" if vocab_size > FEW_IDS else "linear"


def head_options() -> dict[str, Option]:
    """Return the options of all heads by name."""
    return {option.name: option for entry in HEADS.values() for option in entry.options}


def option_fields() -> dict[str, Any]:
    """Return every option of a head as a field for pydantic's create_model; its value is None where it is not set."""
    fields = {}
    for name, option in head_options().items():
        owners = [head for head, entry in HEADS.items() if option in entry.options]
        shown = "every head" if len(owners) == len(HEADS) else f"head {' or '.join(owners)}"
        default = "from the target" if option.of_target else option.default
        bounds: dict[str, Any] = {"ge": option.ge, "le": option.le}
        kind: Any = type(option.default)
        if kind is list:
            kind, bounds = list[Annotated[int, Field(**bounds)]], {"min_length": 1, "max_length": MAX_LIST}
        text = f"{shown}: {option.help} (default: {default})"
        fields[name] = kind | None, Field(None, **bounds, description=text)
    return fields


def check_head_name(name: str, *others: str) -> None:
    """Raise HeadConfigError unless `name` is a known head or one of `others`."""
    if name not in HEADS:
        allowed = ", ".join((*HEADS, *others))
        raise HeadConfigError(f"unknown head {name!r}; allowed: {allowed}; set head to one of them")


def check_head(name: str, options: Mapping[str, Any]) -> None:
    """Validate the options of head `name` by name (None: not set).

    Raises:
        HeadConfigError: the name is unknown, an option belongs to another head, is missing, or does not divide.
    """
    check_head_name(name)
    allowed = {option.name: option for option in HEADS[name].options}
    for key, value in options.items():
        if value is not None and key not in allowed:
            raise HeadConfigError(
                f"{key}={value} is not an option of head {name!r}; allowed: {', '.join(allowed)}; remove {key}"
            )
        if value is None and key in allowed and not allowed[key].is_optional:
            example = f"{key}={allowed[key].default}"
            raise HeadConfigError(f"head {name!r} needs {key}; add it to the config, for example {example}")
    heads, kv_heads = options.get("backbone_heads"), options.get("backbone_kv_heads")
    if heads and kv_heads and heads % kv_heads:
        raise HeadConfigError(
            f"backbone_kv_heads={kv_heads} does not divide backbone_heads={heads}; set backbone_kv_heads to a divisor, "
            f"for example {math.gcd(8, heads)}"
        )


def default_options(name: str, target: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default options of head `name` for a target's config; empty for an unknown head."""
    found = {}
    for option in HEADS[name].options if name in HEADS else ():
        if option.is_optional:
            continue
        value = option.of_target and option.of_target(target)
        found[option.name] = option.default if value is None else value
    return found


def build_head(config: Any) -> Head:
    """Return an untrained head for a HeadConfig, on the current default device and dtype."""
    from pkgutil import resolve_name

    from vllm_mtpc.circuits import get_circuit

    circuit = get_circuit(config.circuit, config.window, config.num_components)
    names = [option.name for option in HEADS[config.head].options]
    options = {name: value for name in names if (value := getattr(config, name)) is not None}
    return resolve_name(HEADS[config.head].location)(circuit, config.vocab_size, config.hidden_size, **options)
