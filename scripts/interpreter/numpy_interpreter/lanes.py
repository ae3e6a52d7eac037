"""All instances of a launch at once: a value that differs between them is an array with a leading axis.

Instances run one after the other cost a Python call for each operation of each. Here each operation is one call for all
of them (MTPC_INTERPRETER=lanes). Where instances diverge at an `if` or a loop's length, their writes are undone and
each group runs by itself, from the start. A read of another instance's write is undefined, as on a GPU. numpy may sum
in another order than for one instance: results are equal up to rounding, which is enough for distributions; `numpy`
equals Triton's bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

AT_ONCE = 1 << 19  # elements of the widest block, over all instances of a go: 4 MB of pointers


class Parted(Exception):
    """Instances do not go the same way. values: which way each goes, [P]."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values


class Lanes(np.lib.mixins.NDArrayOperatorsMixin):
    """Looks like one instance's array; all: [P, *shape], of all instances."""

    __slots__ = ("all",)

    def __init__(self, data: np.ndarray) -> None:
        self.all = data

    @property
    def ndim(self) -> int:
        return self.all.ndim - 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.all.shape[1:]

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> np.dtype:
        return self.all.dtype

    def astype(self, dtype: Any, copy: bool = True) -> Lanes:
        return Lanes(self.all.astype(dtype, copy=copy))

    def view(self, dtype: Any) -> Lanes:
        return Lanes(self.all.view(dtype))

    def reshape(self, *shape: Any) -> Lanes:
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
        return Lanes(self.all.reshape(len(self.all), *shape))

    def any(self) -> bool:
        return bool(self.all.any())

    def __getitem__(self, index: tuple) -> Lanes:
        return Lanes(self.all[(slice(None), *index)])

    def _one(self) -> Any:
        values = self.all.reshape(-1)
        if (values != values[0]).any():
            raise Parted(values)
        return values[0]

    def __bool__(self) -> bool:
        if self.all.dtype != np.bool_:
            return bool((self != 0)._one())
        return bool(self._one())

    def __int__(self) -> int:
        return int(self._one())

    __index__ = __int__

    def wide(self, ndim: int) -> np.ndarray:
        """[P, 1, ..., *shape], with ndim axes after the first."""
        missing = ndim - self.ndim
        return self.all if missing <= 0 else self.all.reshape(len(self.all), *(1,) * missing, *self.shape)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and ufunc.signature is None and not kwargs:
            ndim = max(np.ndim(part) for part in inputs)
            return Lanes(ufunc(*(_wide(part, ndim) for part in inputs)))
        if method == "reduce":
            return Lanes(ufunc.reduce(self.all, **{**kwargs, "axis": self._behind(kwargs.get("axis", 0))}))
        return NotImplemented

    def _behind(self, axis: Any) -> Any:
        if axis is None:
            return tuple(range(1, self.all.ndim))
        return axis if axis < 0 else axis + 1

    def __array_function__(self, function: Callable, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        made = _FUNCTIONS.get(function)
        return NotImplemented if made is None else made(*args, **kwargs)


def _wide(part: Any, ndim: int) -> Any:
    return part.wide(ndim) if part.__class__ is Lanes else part


def _where(condition: Any, x: Any, y: Any) -> Lanes:
    ndim = max(np.ndim(part) for part in (condition, x, y))
    return Lanes(np.where(*(_wide(part, ndim) for part in (condition, x, y))))


def _expand_dims(data: Lanes, axis: Any) -> Lanes:
    axes = axis if isinstance(axis, tuple) else (axis,)
    return Lanes(np.expand_dims(data.all, tuple(at if at < 0 else at + 1 for at in axes)))


def _along(function: Callable) -> Callable[..., Lanes]:
    def along(data: Lanes, axis: int | None = None, keepdims: bool = False) -> Lanes:
        if axis is None:
            if keepdims:
                raise TypeError("all axes, kept")
            return Lanes(function(data.all.reshape(len(data.all), -1), axis=1))
        return Lanes(function(data.all, axis=data._behind(axis), keepdims=keepdims))

    return along


def _broadcast_to(data: Lanes, shape: Any) -> Lanes:
    return Lanes(np.broadcast_to(data.wide(len(shape)), (len(data.all), *shape)))


def _broadcast_arrays(*parts: Any) -> list[Lanes]:
    shape = np.broadcast_shapes(*(np.shape(part) for part in parts))
    count = next(len(part.all) for part in parts if part.__class__ is Lanes)
    return [Lanes(np.broadcast_to(_wide(part, len(shape)), (count, *shape))) for part in parts]


_FUNCTIONS: dict[Callable, Callable] = {
    np.where: _where,
    np.expand_dims: _expand_dims,
    np.cumsum: lambda data, axis: Lanes(np.cumsum(data.all, axis=data._behind(axis))),
    np.broadcast_to: _broadcast_to,
    np.broadcast_arrays: _broadcast_arrays,
    np.stack: lambda parts, axis: Lanes(np.stack([part.all for part in parts], axis=axis)),
    np.any: lambda data: data.any(),
    np.ndim: lambda data: data.ndim,
    np.shape: lambda data: data.shape,
    **{function: _along(function) for function in (np.argmax, np.argmin, np.nanargmax, np.nanargmin)},
}


class Written:
    """The writes of a pass, to be undone: (cells, indices, previous values)."""

    def __init__(self) -> None:
        self.stores: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def before(self, cells: np.ndarray, index: np.ndarray) -> None:
        self.stores.append((cells, index, cells.take(index)))

    def undo(self) -> None:
        for cells, index, data in reversed(self.stores):
            cells[index] = data


def store(cells: np.ndarray, index: Any, data: Any, mask: Any, written: Written) -> None:
    """Writes where `mask` (None: everywhere) is set; of several to one place, the last instance's."""
    if index.__class__ is not Lanes and data.__class__ is not Lanes and mask.__class__ is not Lanes:
        count = 1
    else:
        count = next(len(part.all) for part in (index, data, mask) if part.__class__ is Lanes)
    ndim, shape = index.ndim, (count, *index.shape)
    index = np.broadcast_to(_wide(index, ndim), shape)
    data = np.broadcast_to(_wide(data, ndim), shape)
    if mask is not None:
        is_set = np.broadcast_to(_wide(mask, ndim), shape)
        index, data = index[is_set], data[is_set]
    index, data = index.reshape(-1), data.reshape(-1)
    written.before(cells, index)
    cells[index] = data


def instances(sizes: tuple[int, int, int]) -> np.ndarray:
    """Program ids [P, 3], int32, in the order in which they run one after the other."""
    return np.array(list(itertools.product(*map(range, sizes))), dtype=np.int32).reshape(-1, 3)


def in_goes(ids: np.ndarray, widest: int) -> list[np.ndarray]:
    """ids in parts of as many instances as memory is good for."""
    step = max(1, AT_ONCE // max(1, widest))
    return [ids[start : start + step] for start in range(0, len(ids), step)]
