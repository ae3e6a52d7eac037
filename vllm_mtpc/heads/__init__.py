"""Heads: hidden state -> circuit parameters. Adding one: a file here and its line in _HEADS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_mtpc.errors import HeadConfigError

if TYPE_CHECKING:
    from vllm_mtpc.config import HeadConfig
    from vllm_mtpc.heads.linear import LinearHead

__all__ = ["build_head", "check_head_name"]

_HEADS = {"linear": "vllm_mtpc.heads.linear:LinearHead"}


def check_head_name(name: str) -> None:
    """Raise HeadConfigError unless `name` is a known head."""
    if name not in _HEADS:
        raise HeadConfigError(f"unknown head {name!r}; allowed: {', '.join(_HEADS)}; set head to one of them")


def build_head(config: HeadConfig) -> LinearHead:
    """An untrained head for a config, on the current default device and dtype."""
    from pkgutil import resolve_name

    from vllm_mtpc.circuits import get_circuit

    check_head_name(config.head)
    circuit = get_circuit(config.circuit, config.window, config.num_components)
    return resolve_name(_HEADS[config.head])(circuit, config.vocab_size, config.hidden_size)
