"""Circuits over a window of tokens; pure PyTorch. Adding one: a file here and its line in CIRCUITS."""

from __future__ import annotations

from vllm_mtpc.circuits.base import Circuit, CircuitParams, FilterState
from vllm_mtpc.circuits.btree import BTree
from vllm_mtpc.circuits.cp import CP
from vllm_mtpc.circuits.ff import FullyFactorised
from vllm_mtpc.circuits.hmm import HMM
from vllm_mtpc.errors import HeadConfigError

__all__ = ["CIRCUITS", "Circuit", "CircuitParams", "FilterState", "get_circuit"]

CIRCUITS: dict[str, type[Circuit]] = {cls.name: cls for cls in (FullyFactorised, CP, HMM, BTree)}


def get_circuit(name: str, window: int, num_components: int) -> Circuit:
    """The circuit called `name`; raises HeadConfigError for an unknown name or impossible sizes."""
    if name not in CIRCUITS:
        raise HeadConfigError(f"unknown circuit {name!r}; allowed: {', '.join(CIRCUITS)}; set circuit to one of them")
    return CIRCUITS[name](window, num_components)
