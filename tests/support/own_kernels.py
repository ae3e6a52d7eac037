"""Unit-test inputs of the kernels of this package, compared in both interpreters (see scripts/interpreter).

To be called in a fork of "v2" with MTPC_INTERPRETER=check or check-once (tests/support/forks.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy_interpreter import check, functions, language, memory
from numpy_interpreter.values import Value

from tests.support import draft_cases, filter_cases, interpreted, kernel_cases, odd_kernels
from vllm_mtpc.kernels.shard import Shard

# The second of two ranks, which hears its own from both
ON_A_RANK = replace(draft_cases.BLOCKS, shard=Shard(1, 2, 1300, lambda own: own.repeat(2, 1), 1400))


def launch_all(names: set[str] | None) -> None:
    for cases, launch in (
        (kernel_cases.CASES, interpreted.launch_all),
        (filter_cases.CASES, filter_cases.launch_all),
        (draft_cases.CASES, draft_cases.draft_all),
    ):
        chosen = {name: case for name, case in cases.items() if names is None or name in names}
        interpreted.poisoned(launch, chosen, "cpu")
    interpreted.poisoned(draft_cases.draft_all, {"a rank": ON_A_RANK}, "cpu")
    odd_kernels.launch_all()


def _other_order(x: Value, axis: int | None = None) -> Value:
    return language._sum(Value(np.flip(x.data, axis).copy(), x.kind), axis)


def _other_dtype(x: Value) -> Value:
    return Value(np.exp(x.data.astype(np.float64)).astype(x.kind.dtype), x.kind)


def _lost_store(pointer: Value, value: Value, mask: Value | None = None) -> None:
    if pointer.shape:
        memory.store(pointer, value, mask)


INJECTED = {"order": ("sum", _other_order), "dtype": ("exp", _other_dtype), "lost store": ("store", _lost_store)}


def found_with(name: str, fault: Callable) -> dict[str, Any]:
    """What comparing finds in a few launches with a function of the language replaced."""
    generator = torch.Generator().manual_seed(0)
    logits, u = torch.randn(4, 5001, generator=generator), torch.rand(4, generator=generator)
    right = getattr(functions._LANGUAGE, name)
    setattr(functions._LANGUAGE, name, fault)
    check.REPORT.clear()
    check.SEEN.clear()
    interpreted.launch_all({"pick": ("pick", (logits, u))}, "cpu")
    odd_kernels.tiles[(1,)](logits, torch.zeros(9 * odd_kernels.SIZE), SIZE=odd_kernels.SIZE)
    setattr(functions._LANGUAGE, name, right)
    return dict(check.REPORT)


def compare(names: set[str] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what comparing launches of some cases or all found, and the same of each fault of INJECTED."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # masked lanes: -inf - -inf among them
    launch_all(names)
    report = dict(check.REPORT)
    return report, {name: found_with(*fault) for name, fault in INJECTED.items()}
