"""Circuits over a window of tokens; pure PyTorch. Adding one: a file here and its line in CIRCUITS."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from vllm_mtpc.errors import HeadConfigError

if TYPE_CHECKING:
    from vllm_mtpc.circuits.base import Circuit

CIRCUITS = {  # paths, not classes: help texts name circuits without importing torch
    "ff": "vllm_mtpc.circuits.chains:FullyFactorised",
    "cp": "vllm_mtpc.circuits.chains:CP",
    "hmm": "vllm_mtpc.circuits.chains:HMM",
    "btree": "vllm_mtpc.circuits.btree:BTree",
}


def circuit_class(name: str) -> type[Circuit]:
    """Return the class of a key of CIRCUITS; raises HeadConfigError for another name."""
    if name not in CIRCUITS:
        raise HeadConfigError(f"unknown circuit {name!r}; allowed: {', '.join(CIRCUITS)}; set circuit to one of them")
    return resolve_name(CIRCUITS[name])


def get_circuit(name: str, window: int, num_components: int) -> Circuit:
    """Return a circuit of `window` tokens and r latent states; HeadConfigError: not such a name or size."""
    return circuit_class(name)(window, num_components)
