"""Runs Triton kernels on a test's inputs: natively on a GPU, else interpreted in one forked process."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tests.support import forks

Case = tuple[str, tuple[Any, ...]]  # name of the operation (or "operation:function"), its arguments
Cases = dict[str, Any]


def launch(function: Callable[[Cases, str], Any], cases: Cases) -> Any:
    """Return function(cases, device): with "cuda" here, or with "cpu" in a fork whose kernels are interpreted."""
    if torch.cuda.is_available():
        return poisoned(function, cases, "cuda")
    name = f"{function.__module__}:{function.__name__}"
    return forks.call("v2", "tests.support.interpreted:_interpret", name, cases, timeout=600)


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


def launched_kernels(*folders: str) -> set[str]:
    """Names of the jit functions that the sources in these folders of the repository launch."""
    files = [file for folder in folders for file in (forks.ROOT / folder).rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    kernels = set(re.findall(r"@triton\.jit(?:\([^)]*\))?\s+def (\w+)", text))
    return kernels & set(re.findall(r"\b(\w+)\[\(", text))


FUNCTIONS = {"couple": "accept", "leaf": "terms"}  # of operations with another name


def launch_all(cases: dict[str, Case], device: str) -> dict[str, Any]:
    """Return the output of each case's kernel on the CPU."""
    results = {}
    for name, (operation, arguments) in cases.items():
        module, _, function = operation.partition(":")
        by_device = import_module(f"vllm_mtpc.kernels.{module}" + ("" if device == "cuda" else ".kernel"))
        function = function or FUNCTIONS.get(module, module)
        out = getattr(by_device, function)(*(moved(part, device) for part in arguments))
        results[name] = out.cpu() if isinstance(out, Tensor) else tuple(part.cpu() for part in out)
    return results


def moved(tensor: Any, device: str) -> Any:
    """Copy a tensor, or those of a tuple, to the device with strides and storage; return numbers unchanged."""
    if isinstance(tensor, tuple):
        return tuple(moved(part, device) for part in tensor)
    if not isinstance(tensor, Tensor):
        return tensor
    everything = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return everything.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
