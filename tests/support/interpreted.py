"""Runs Triton kernels on a test's inputs: natively on a GPU, else interpreted in one forked process.

Buffers that a launcher leaves uninitialised have NaN and the largest integers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tests.support import forks

ON_GPU = torch.cuda.is_available()
Case = tuple[str, tuple[Any, ...]]  # name of the operation, its arguments


def launch(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return function(*arguments, device): with "cuda" here, or with "cpu" in a fork whose kernels are interpreted."""
    if ON_GPU:
        return function(*arguments, "cuda")
    name = f"{function.__module__}:{function.__name__}"
    return forks.call("v2", "tests.support.interpreted:_interpret", name, arguments, timeout=600)


def _interpret(name: str, arguments: tuple[Any, ...]) -> Any:
    warnings.simplefilter("ignore")  # the interpreter computes masked lanes, -inf - -inf among them
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)(*arguments, "cpu")


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill what torch.empty returns."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


FUNCTIONS = {"couple": "accept", "leaf": "terms"}  # of operations with another name


def run(cases: dict[str, Case]) -> dict[str, Any]:
    """Return the output of each case's kernel on the CPU; "poison" is the content of an uninitialised buffer."""
    return launch(launch_all, cases)


def launch_all(cases: dict[str, Case], device: str) -> dict[str, Any]:
    with poisoned():
        results = {"poison": torch.empty(4, device=device).cpu()}
        for name, (operation, arguments) in cases.items():
            by_device = import_module(f"vllm_mtpc.kernels.{operation}" + ("" if device == "cuda" else ".kernel"))
            function = getattr(by_device, FUNCTIONS.get(operation, operation))
            out = function(*(moved(argument, device) for argument in arguments))
            results[name] = out.cpu() if isinstance(out, Tensor) else tuple(part.cpu() for part in out)
        return results


def moved(tensor: Any, device: str) -> Any:
    """Copy a tensor to the device with its strides and storage; return numbers unchanged."""
    if not isinstance(tensor, Tensor):
        return tensor
    everything = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return everything.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
