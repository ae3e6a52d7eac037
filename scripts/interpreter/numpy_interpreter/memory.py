"""Loads and stores. Memory is one numpy array per element type, over all addresses: a pointer is an index into it.

Only the addresses of a kernel's pointers are read and written; an invalid address ends the process, as in Triton's
interpreter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from triton.runtime import interpreter as triton_interpreter

from numpy_interpreter.kinds import BASE, BOOL, INT8, Data, Kind, Unsupported, cast, to_address
from numpy_interpreter.lanes import Lanes, Written
from numpy_interpreter.lanes import store as store_lanes
from numpy_interpreter.values import Number, Value, as_value

has_written = False  # since it was set to False: launch.py
written: Written | None = None  # of instances that run at once: launch.py


class _Everything:
    def __init__(self, dtype: np.dtype) -> None:
        shape = (((1 << 48) - BASE) // dtype.itemsize,)
        self.__array_interface__ = {"data": (BASE, False), "shape": shape, "typestr": dtype.str, "version": 3}


_CELLS: dict[np.dtype, np.ndarray] = {}
_NOTHING = np.zeros(8, np.uint8)  # where lanes that are masked out read


def cells(dtype: np.dtype) -> np.ndarray:
    """All of memory as elements of a type."""
    if dtype not in _CELLS:
        _CELLS[dtype] = np.asarray(_Everything(dtype))
    return _CELLS[dtype]


class _Access:
    """Memory access by a pointer's type: cells, type of a stored and of a loaded element."""

    __slots__ = ("cells", "kind", "nothing", "stored")

    def __init__(self, pointer: Kind) -> None:
        if pointer.element is None:
            raise Unsupported(f"a pointer of type {pointer.triton}")
        self.kind = pointer.element
        self.stored = INT8 if self.kind is BOOL else self.kind
        self.cells = cells(self.stored.dtype)
        self.nothing = np.int64((_NOTHING.ctypes.data - BASE) // self.stored.dtype.itemsize)


_ACCESS: dict[Kind, _Access] = {}


def _access(pointer: Kind) -> _Access:
    access = _ACCESS.get(pointer)
    if access is None:
        access = _ACCESS[pointer] = _Access(pointer)
    return access


def _as_mask(mask: Value | bool) -> Data:
    mask = as_value(mask)
    return mask.data if mask.kind is BOOL else mask.data.astype(np.bool_)


def load(
    pointer: Value,
    mask: Value | bool | None = None,
    other: Value | Number | None = None,
    *,
    cache_modifier: str = "",
    eviction_policy: str = "",
    volatile: bool = False,
) -> Value:
    """What lies at pointers; `other`, or 0, where the mask is not set."""
    access = _access(pointer.kind)
    index = pointer.data
    if mask is None:
        data = _read(access, index)
    else:
        is_read = _as_mask(mask)
        if index.ndim or index.__class__ is Lanes or is_read.__class__ is Lanes:
            data = _load_block(access, index, is_read, other)
        elif is_read:
            data = access.cells[index]
        else:
            data = access.stored.constant(0) if other is None else _stored(other, access)
    return Value(data != 0 if access.kind is BOOL else data, access.kind)


def _read(access: _Access, index: Data) -> Data:
    if index.__class__ is Lanes:
        return Lanes(access.cells.take(index.all))
    return access.cells.take(index) if index.ndim else access.cells[index]


def _load_block(access: _Access, index: Data, is_read: Data, other: Value | Number | None) -> Data:
    data = _read(access, np.where(is_read, index, access.nothing))
    if other is None or (other.__class__ is int and other == 0):
        return data
    return np.where(is_read, data, _stored(other, access))


def _stored(value: Value | Number, access: _Access) -> Data:
    value = as_value(value)
    data = cast(value.data, value.kind, access.kind)
    return data.astype(np.int8) if access.kind is BOOL else data


def store(
    pointer: Value,
    value: Value | Number,
    mask: Value | bool | None = None,
    *,
    cache_modifier: str = "",
    eviction_policy: str = "",
) -> None:
    """Writes to where pointers point and the mask, if any, is set."""
    global has_written
    access = _access(pointer.kind)
    data = _stored(value, access)
    index = pointer.data
    is_written = None if mask is None else _as_mask(mask)
    if written is not None:
        if data.ndim > index.ndim:
            raise Unsupported("a block stored at a scalar pointer")
        store_lanes(access.cells, index, data, is_written, written)
        return
    if index.ndim:
        if data.ndim and data.shape != index.shape:
            data = np.broadcast_to(data, index.shape)
        if is_written is not None:
            if is_written.shape != index.shape:
                is_written = np.broadcast_to(is_written, index.shape)
            index = index[is_written]
            data = data[is_written] if data.ndim else data
    elif data.ndim or (is_written is not None and not is_written):
        if data.ndim:
            raise Unsupported("a block stored at a scalar pointer")
        return
    has_written = True
    access.cells[index] = data


_RMW = triton_interpreter._interpreter.RMW_OP
_OF_FLOATS = {"ADD": "FADD", "XCHG": "XCHG"}
_ORDER = triton_interpreter._interpreter.MEM_SEMANTIC.ACQUIRE_RELEASE


def _atomic(name: str) -> Any:
    def atomic(
        pointer: Value, val: Value | Number, mask: Value | bool | None = None, sem: None = None, scope: None = None
    ) -> Value:
        """Changes what lies at pointers, one after the other; returns what lay there."""
        global has_written
        kind = _access(pointer.kind).kind
        if written is not None:
            raise Unsupported("atomics of instances that run at once")
        if kind.dtype.itemsize < 4 or (kind.is_float and name not in _OF_FLOATS):
            raise Unsupported(f"atomic {name} of {kind.triton}")
        operation = _OF_FLOATS[name] if kind.is_float else name
        if name in ("MAX", "MIN") and not kind.is_signed:
            operation = "U" + name
        index = pointer.data
        shape = index.shape or (1,)
        addresses = np.broadcast_to(to_address(index, pointer.kind), shape).astype(np.uint64)
        data = np.ascontiguousarray(np.broadcast_to(_stored(val, _access(pointer.kind)), shape))
        is_set = np.ascontiguousarray(np.broadcast_to(True if mask is None else _as_mask(mask), shape))
        has_written = True
        before = triton_interpreter._interpreter.atomic_rmw(getattr(_RMW, operation), addresses, data, is_set, _ORDER)
        return Value(before if index.ndim else before[0], kind)

    return atomic


ATOMICS = {f"atomic_{name.lower()}": _atomic(name) for name in ("ADD", "AND", "OR", "XOR", "MAX", "MIN", "XCHG")}


def pointer_to(tensor: Any, kind: Kind) -> Value:
    """To the first element of a tensor."""
    return Value(np.int64((tensor.data_ptr() - BASE) // kind.element.dtype.itemsize), kind)
