"""Runs every launch on both interpreters and compares all writes byte for byte.

A launch runs here first, and each store is recorded with the previous bytes; these are restored and Triton's
interpreter runs, its stores recorded too. The two lists must be equal: the same addresses in the same order, the same
bits. Triton's writes stay. REPORT has the differences. MTPC_INTERPRETER=check-once compares the first launch of each
kernel with one set of constants and dtypes; other launches run here only.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder

from numpy_interpreter import launch, memory
from numpy_interpreter.functions import python_function
from numpy_interpreter.kinds import BASE

REPORT: dict[str, dict[str, Any]] = {}  # by kernel: launches, compared, fell_back (why), differs (where)
SEEN: set[tuple] = set()  # kernels with their constants and dtypes, where one launch of each is compared


class _Journal:
    """Stores of one launch: (addresses, size of an element, bits before, bits after)."""

    def __init__(self) -> None:
        self.stores: list[tuple[np.ndarray, int, np.ndarray, np.ndarray]] = []

    def before(self, addresses: Any, size: int) -> None:
        addresses = np.array(addresses, dtype=np.int64).reshape(-1)
        self._pending = (addresses, size, _bits(addresses, size))

    def after(self) -> None:
        addresses, size, before = self._pending
        if len(addresses):
            self.stores.append((addresses, size, before, _bits(addresses, size)))

    def undo(self) -> None:
        for addresses, size, before, _ in reversed(self.stores):
            memory.cells(np.dtype(f"u{size}"))[(addresses - BASE) // size] = before


def _bits(addresses: np.ndarray, size: int) -> np.ndarray:
    return memory.cells(np.dtype(f"u{size}")).take((addresses - BASE) // size)


def _difference(ours: _Journal, tritons: _Journal) -> str | None:
    if len(ours.stores) != len(tritons.stores):
        return f"{len(ours.stores)} stores here, {len(tritons.stores)} there"
    for number, (a, b) in enumerate(zip(ours.stores, tritons.stores, strict=True)):
        if a[1] != b[1] or not np.array_equal(a[0], b[0]):
            return f"store {number}: other addresses"
        if not np.array_equal(a[3], b[3]):
            at = int(np.flatnonzero(a[3] != b[3])[0])
            return f"store {number}, element {at} of {len(a[3])}: bits {a[3][at]:x} here, {b[3][at]:x} there"
    return None


def install() -> None:
    """Has every launch of this process compared."""
    store, atomic = InterpreterBuilder.create_masked_store, InterpreterBuilder.create_atomic_rmw

    def noted(pointers: Any, value: Any, mask: Any) -> None:
        is_set = np.broadcast_to(mask.data.astype(np.bool_), pointers.data.shape)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        memory.journal.before(pointers.data[is_set], size)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if memory.journal is None:
            return store(self, ptrs, value, mask, *rest)
        noted(ptrs, value, mask)
        result = store(self, ptrs, value, mask, *rest)
        memory.journal.after()
        return result

    def create_atomic_rmw(self: Any, operation: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        if memory.journal is None:
            return atomic(self, operation, ptr, val, mask, *rest)
        noted(ptr, val, mask)
        result = atomic(self, operation, ptr, val, mask, *rest)
        memory.journal.after()
        return result

    InterpretedFunction.run = run
    InterpreterBuilder.create_masked_store = create_masked_store
    InterpreterBuilder.create_atomic_rmw = create_atomic_rmw


def _entry(original: Any) -> dict[str, Any]:
    name = f"{original.__module__}.{original.__qualname__}"
    return REPORT.setdefault(name, {"launches": 0, "compared": 0, "fell_back": None, "differs": []})


def _trait(argument: Any, is_constant: bool) -> str:
    """What launches of one kernel differ in."""
    return str(argument) if is_constant else str(getattr(argument, "dtype", type(argument)))


def _is_due(original: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    if os.environ["MTPC_INTERPRETER"] == "check":
        return True
    signature = launch.signature_of(original)
    given = signature.bind(args, kwargs)
    key = (original, *(_trait(given[name], name in signature.constants) for name in signature.names))
    is_new = key not in SEEN
    SEEN.add(key)
    return is_new


def run(kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In the place of `InterpretedFunction.run`."""
    if warmup:
        return
    original = python_function(kernel)
    entry = _entry(original)
    entry["launches"] += 1
    if original in launch.fallen_back or not _is_due(original, args, kwargs):
        return launch.run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
    ours, tritons = _Journal(), _Journal()
    reason = None
    try:
        memory.journal = ours
        launch.interpret(kernel, args, grid, kwargs)
    except Exception as error:
        reason = repr(error)
    ours.undo()
    try:
        memory.journal = tritons
        launch.tritons_run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
    finally:
        memory.journal = None
    if reason:
        launch.fallen_back[original] = entry["fell_back"] = reason
        return
    entry["compared"] += 1
    if difference := _difference(ours, tritons):
        entry["differs"].append(difference)
