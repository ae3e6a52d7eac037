"""Runs Triton kernels on what a test gives them: natively on a GPU, else interpreted in one forked process.

Buffers that a kernel's launcher leaves uninitialised hold NaN and the largest integers.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support import forks

ROOT = Path(__file__).parents[2]
ON_GPU = torch.cuda.is_available()

Case = tuple[str, tuple[Any, ...]]  # name of the operation, its arguments


def run(cases: dict[str, Case], functions: dict[str, str] | None = None) -> dict[str, Any]:
    """What each case's kernel returns, on the CPU; "poison" is what an uninitialised buffer held.

    functions: the function of an operation whose name is another.
    """
    if ON_GPU:
        return {name: _to_cpu(out) for name, out in _launch(cases, functions or {}, "cuda").items()}
    return forks.call("v2", "tests.support.interpreted:_interpret", cases, functions or {}, timeout=600)


def _interpret(cases: dict[str, Case], functions: dict[str, str]) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # the interpreter computes lanes that are masked out, -inf - -inf among them
    return _launch(cases, functions, "cpu")


def _launch(cases: dict[str, Case], functions: dict[str, str], device: str) -> dict[str, Any]:
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    try:
        results = {"poison": torch.empty(4, device=device)}
        for name, (operation, arguments) in cases.items():
            by_device = import_module(f"vllm_mtpc.kernels.{operation}" + ("" if device == "cuda" else ".kernel"))
            function = getattr(by_device, functions.get(operation, operation))
            results[name] = function(*(moved(argument, device) for argument in arguments))
        return results
    finally:
        torch.use_deterministic_algorithms(was_deterministic)


def _to_cpu(out: Any) -> Any:
    return out.cpu() if isinstance(out, Tensor) else tuple(part.cpu() for part in out)


def moved(tensor: Any, device: str) -> Any:
    """On the device, with the strides kept: rows with something behind them stay so. Numbers as they are."""
    if not isinstance(tensor, Tensor):
        return tensor
    everything = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(device)
    return everything.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
