"""Runs Triton kernels on a test's inputs: natively on a GPU, else interpreted in one forked process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import forks

Cases = dict[str, Any]


# Of fixtures: the interpreter
INTERPRETERS = ["numpy", pytest.param("triton", marks=pytest.mark.slow)]


def launch(function: Callable[[Cases, str], Any], cases: Cases, interpreter: str) -> Any:
    """Return function(cases, device): with "cuda" here, or with "cpu" in a fork whose kernels are interpreted."""
    if torch.cuda.is_available():
        return poisoned(function, cases, "cuda")
    name = f"{function.__module__}:{function.__name__}"
    return forks.call("v2", "tests.support.interpreted:_interpret", name, cases, MTPC_INTERPRETER=interpreter)


def _interpret(name: str, cases: Cases) -> Any:
    warnings.simplefilter("ignore")  # the interpreter computes masked lanes, -inf - -inf among them
    module, _, function = name.partition(":")
    return poisoned(getattr(import_module(module), function), cases, "cpu")


def poisoned(function: Callable[[Cases, str], Any], cases: Cases, device: str) -> Any:
    """Return function(cases, device), with NaN and the largest integers in what torch.empty returns."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(4, device=device).isnan().all()
        return function(cases, device)
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


def moved(tensor: Any, device: str) -> Any:
    """Copy a tensor, or those of a tuple, to the device with strides and storage; return numbers unchanged."""
    if isinstance(tensor, tuple):
        parts = [moved(part, device) for part in tensor]
        return type(tensor)(*parts) if hasattr(tensor, "_fields") else tuple(parts)
    if not isinstance(tensor, Tensor):
        return tensor
    everything = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return everything.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
