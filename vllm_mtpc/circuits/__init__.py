"""Circuits over a window of tokens; pure PyTorch. Adding one: a file here and its line in CIRCUITS."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_mtpc.errors import HeadConfigError

if TYPE_CHECKING:
    from vllm_mtpc.circuits.base import Circuit, CircuitParams, DraftVocabulary, FilterState, Latents

__all__ = [
    "CIRCUITS", "Circuit", "CircuitParams", "DraftVocabulary", "FilterState", "Latents", "circuit_class", "get_circuit",
]  # fmt: skip

CIRCUITS = {  # paths, not classes: help texts name circuits without importing torch
    "ff": "vllm_mtpc.circuits.ff:FullyFactorised",
    "cp": "vllm_mtpc.circuits.cp:CP",
    "hmm": "vllm_mtpc.circuits.hmm:HMM",
    "btree": "vllm_mtpc.circuits.btree:BTree",
}


def circuit_class(name: str) -> type[Circuit]:
    """Return the class of a key of CIRCUITS; raises HeadConfigError for another name."""
    from pkgutil import resolve_name

    if name not in CIRCUITS:
        raise HeadConfigError(f"unknown circuit {name!r}; allowed: {', '.join(CIRCUITS)}; set circuit to one of them")
    return resolve_name(CIRCUITS[name])


def get_circuit(name: str, window: int, num_components: int) -> Circuit:
    """Return a circuit of `window` tokens and `num_components` latent states.

    Raises:
        HeadConfigError: the name is not in CIRCUITS or a size is out of range.
    """
    return circuit_class(name)(window, num_components)


def __getattr__(name: str) -> Any:
    """Import the names of `base` when they are first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_mtpc.circuits import base

    return getattr(base, name)
