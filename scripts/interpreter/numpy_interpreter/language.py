"""`triton.language` for kernels that run here, each function as the numpy call of Triton's interpreter.

Functions that Triton writes in terms of these (`tl.rand`, `tl.cdiv`, `tl.sigmoid`) are converted like device functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.core import PropagateNan
from triton.runtime import interpreter as triton_interpreter

from numpy_interpreter import memory
from numpy_interpreter.kinds import (
    FLOAT32,
    FLOAT64,
    INT32,
    UINT32,
    Data,
    Kind,
    Unsupported,
    cast,
    kind_of,
)
from numpy_interpreter.lanes import Lanes
from numpy_interpreter.values import Number, Value, as_value, operands, select

instance: Any = (0, 0, 0)  # set by launch.py; [P, 3] where instances run at once
grid = (1, 1, 1)

_RANGES: dict[tuple[int, int], Value] = {}


def _program_id(axis: int) -> Value:
    if isinstance(instance, np.ndarray) and grid[axis] > 1:
        return Value(Lanes(instance[:, axis]), INT32)
    return Value(np.int32(0 if isinstance(instance, np.ndarray) else instance[axis]), INT32)


def _num_programs(axis: int) -> Value:
    return Value(np.int32(grid[axis]), INT32)


def _arange(start: int, end: int) -> Value:
    made = _RANGES.get((start, end))
    if made is None:
        made = _RANGES[start, end] = Value(np.arange(start, end, dtype=np.int32), INT32)
    return made


def _full(shape: Any, value: Value | Number, dtype: tl.dtype) -> Value:
    kind = kind_of(dtype)
    data = cast(value.data, value.kind, kind) if value.__class__ is Value else kind.constant(value)
    shape = [int(size) for size in shape]
    if data.__class__ is Lanes:
        return Value(np.broadcast_to(data, shape), kind)
    return Value(np.full(shape, data, dtype=kind.dtype) if shape else data, kind)


def _zeros(shape: Any, dtype: tl.dtype) -> Value:
    return _full(shape, 0, dtype)


def _zeros_like(input: Value) -> Value:
    return _full(input.shape, 0, input.dtype)


def _cast(input: Value | Number, dtype: tl.dtype, fp_downcast_rounding: None = None, bitcast: bool = False) -> Value:
    return as_value(input).to(dtype, fp_downcast_rounding, bitcast)


def _expand_dims(input: Value | Number, axis: Any) -> Value:
    input = as_value(input)
    if axis.__class__ is int and 0 <= axis <= input.data.ndim > 0:
        shape = input.data.shape
        return Value(input.data.reshape(*shape[:axis], 1, *shape[axis:]), input.kind)
    return Value(np.expand_dims(input.data, tuple(axis) if isinstance(axis, (list, tuple)) else axis), input.kind)


def _shape(shape: tuple) -> tuple[int, ...]:
    """Given as one tuple or as several arguments."""
    shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (list, tuple)) else shape
    return tuple(int(size) for size in shape)


def _reshape(input: Value, *shape: Any) -> Value:
    return Value(input.data.reshape(_shape(shape)), input.kind)


def _broadcast_to(input: Value | Number, *shape: Any) -> Value:
    input = as_value(input)
    return Value(np.broadcast_to(input.data, _shape(shape)), input.kind)


def _join(a: Value | Number, b: Value | Number) -> Value:
    a, b = as_value(a), as_value(b)
    if a.kind is not b.kind:
        raise Unsupported("tl.join of two types")
    return Value(np.stack(np.broadcast_arrays(a.data, b.data), axis=-1), a.kind)


def _interleave(a: Value, b: Value) -> Value:
    joined = _join(a, b)
    return _reshape(joined, (*joined.shape[:-2], 2 * joined.shape[-2])) if len(joined.shape) > 1 else joined


def _extreme(of_float: Callable, of_nan: Callable, of_int: Callable) -> Callable[..., Value]:
    def extreme(x: Value | Number, y: Value | Number, propagate_nan: Any = PropagateNan.NONE) -> Value:
        a, b, kind = operands(x, y)
        function = of_int if kind.is_int else of_float if propagate_nan == PropagateNan.NONE else of_nan
        return Value(function(a, b), kind)

    return extreme


_maximum = _extreme(np.fmax, np.maximum, np.maximum)
_minimum = _extreme(np.fmin, np.minimum, np.minimum)


def _clamp(x: Value, min: Value | Number, max: Value | Number) -> Value:
    if x.kind not in (FLOAT32, FLOAT64) or any(b.__class__ is Value and b.kind is not x.kind for b in (min, max)):
        raise Unsupported("tl.clamp of mixed types")
    return _minimum(_maximum(x, min), max)


def _of_float(function: Callable[[Data], Data]) -> Callable[[Value | Number], Value]:
    def unary(x: Value | Number) -> Value:
        x = as_value(x)
        if x.kind is not FLOAT32 and x.kind is not FLOAT64:
            raise Unsupported(f"{function} of {x.kind.triton}")
        return Value(function(x.data), x.kind)

    return unary


def _erf(data: Data) -> Data:
    function = triton_interpreter.np_erf_fp32 if data.dtype == np.float32 else triton_interpreter.np_erf_fp64
    if data.__class__ is Lanes:
        return Lanes(function(data.all))
    found = function(data)
    return found if data.ndim else found[()]


def _abs(x: Value | Number) -> Value:
    x = as_value(x)
    if x.kind.is_signed:
        return Value(np.abs(x.data), x.kind)
    if not x.kind.is_float:
        return x
    unsigned = np.dtype(f"uint{8 * x.kind.dtype.itemsize}")
    return Value((x.data.view(unsigned) & unsigned.type(np.iinfo(unsigned).max >> 1)).view(x.kind.dtype), x.kind)


def _fma(x: Value | Number, y: Value | Number, z: Value | Number) -> Value:
    x, y, z = as_value(x), as_value(y), as_value(z)
    if not x.kind is y.kind is z.kind or x.kind not in (FLOAT32, FLOAT64):
        raise Unsupported("tl.fma of mixed types")
    triton = triton_interpreter._interpreter
    fused = triton.fma_fp32 if x.kind is FLOAT32 else triton.fma_fp64
    data = fused(*np.broadcast_arrays(*(np.atleast_1d(part.data) for part in (x, y, z))))
    return Value(data if x.data.ndim + y.data.ndim + z.data.ndim else data[0], x.kind)


def _fdiv(x: Value | Number, y: Value | Number, ieee_rounding: bool = False) -> Value:
    x, y, kind = operands(x, y, is_division=True)
    if not kind.is_float:
        raise Unsupported("tl.fdiv of integers")
    return Value(x / y, kind)


def _umulhi(x: Value | Number, y: Value | Number) -> Value:
    a, b, kind = operands(x, y)
    if kind.dtype.itemsize != 4:
        raise Unsupported(f"tl.umulhi of {kind.triton}")
    product = np.multiply(a.view(np.uint32).astype(np.uint64), b.view(np.uint32).astype(np.uint64))
    return Value((product >> np.uint64(32)).astype(np.uint32).view(kind.dtype), kind)


def _sum(input: Value, axis: int | None = None, keep_dims: bool = False, dtype: tl.dtype | None = None) -> Value:
    kind = kind_of(dtype) if dtype is not None else _summed(input.kind)
    data = np.add.reduce(cast(input.data, input.kind, kind), axis=axis, keepdims=keep_dims)
    return Value(data.astype(kind.dtype, copy=False), kind)


def _summed(kind: Kind) -> Kind:
    if kind.is_int and kind.dtype.itemsize < 4:
        return INT32 if kind.is_signed else UINT32
    return kind


def _cumsum(input: Value, axis: int = 0, reverse: bool = False, dtype: tl.dtype | None = None) -> Value:
    if reverse:
        raise Unsupported("tl.cumsum in reverse")
    kind = kind_of(dtype) if dtype is not None else _summed(input.kind)
    return Value(np.cumsum(cast(input.data, input.kind, kind), axis=axis).astype(kind.dtype, copy=False), kind)


def _best(reduce: Callable, index: Callable, index_without_nan: Callable) -> Callable[..., Any]:
    """Largest or smallest along an axis, NaN left out; equal ones: the first."""

    def best(
        input: Value,
        axis: int | None = None,
        return_indices: bool = False,
        return_indices_tie_break_left: bool = True,
        keep_dims: bool = False,
    ) -> Any:
        kind, data = input.kind, input.data
        if not return_indices:
            if kind.triton.primitive_bitwidth < 32:
                kind = FLOAT32 if kind.is_float else INT32
                data = cast(data, input.kind, kind)
            return Value(reduce(data, axis=axis, keepdims=keep_dims), kind)
        has_nan = kind.dtype.kind == "f" and np.isnan(data).any()
        at = (index if has_nan else index_without_nan)(data, axis=axis, keepdims=keep_dims)
        return Value(reduce(data, axis=axis, keepdims=keep_dims), kind), Value(at.astype(np.int32), INT32)

    return best


_max = _best(np.fmax.reduce, np.nanargmax, np.argmax)
_min = _best(np.fmin.reduce, np.nanargmin, np.argmin)


def _argmax(input: Value, axis: int, tie_break_left: bool = True, keep_dims: bool = False) -> Value:
    return _max(input, axis, True, tie_break_left, keep_dims)[1]


def _argmin(input: Value, axis: int, tie_break_left: bool = True, keep_dims: bool = False) -> Value:
    return _min(input, axis, True, tie_break_left, keep_dims)[1]


def _dot(
    input: Value,
    other: Value,
    acc: Value | None = None,
    input_precision: str | None = None,
    allow_tf32: bool | None = None,
) -> Value:
    """Precisions are alike: products are numpy's."""
    if input.kind is not other.kind or input.kind is not FLOAT32 or (acc is not None and acc.kind is not FLOAT32):
        raise Unsupported(f"tl.dot of {input.kind.triton} and {other.kind.triton}")
    before = acc.data if acc is not None else np.full((input.shape[-2], other.shape[-1]), np.float32(0))
    return Value(np.matmul(input.data, other.data, dtype=np.float32) + before, FLOAT32)


def _range(start: Any, end: Any = None, step: Any = None, **hints: Any) -> Iterable[Any]:
    start, end = (0, start) if end is None else (start, end)
    step = 1 if step is None else step
    if not any(bound.__class__ is Value and bound.data.__class__ is Lanes for bound in (start, end)):
        return range(start, end, step)
    # instances may begin at different numbers, as long as they take as many turns
    turns = int((as_value(end) - start + (int(step) - 1)) // step)
    return (as_value(start) + turn * int(step) for turn in range(turns))


def _assert(condition: Any, message: str = "", mask: Any = None) -> None:
    assert condition, message


def _nothing(*_: Any, **__: Any) -> None:
    """Of no effect in Triton's interpreter."""


def _same(input: Any, *_: Any) -> Any:
    return input


NAMES: dict[str, Any] = {
    "PropagateNan": PropagateNan,
    "abs": _abs,
    "add": lambda x, y, sanitize_overflow=True: as_value(x) + y,
    "arange": _arange,
    "argmax": _argmax,
    "argmin": _argmin,
    "assume": _nothing,
    "broadcast_to": _broadcast_to,
    "cast": _cast,
    "ceil": _of_float(np.ceil),
    "clamp": _clamp,
    "constexpr": _same,
    "cos": _of_float(np.cos),
    "cumsum": _cumsum,
    "debug_barrier": _nothing,
    "device_assert": _nothing,
    "div_rn": lambda x, y: _fdiv(x, y),
    "dot": _dot,
    "erf": _of_float(_erf),
    "exp": _of_float(np.exp),
    "exp2": _of_float(np.exp2),
    "expand_dims": _expand_dims,
    "fdiv": _fdiv,
    "floor": _of_float(np.floor),
    "fma": _fma,
    "full": _full,
    "interleave": _interleave,
    "join": _join,
    "load": memory.load,
    "log": _of_float(np.log),
    "log1p": lambda x: _of_float(np.log)(1.0 + as_value(x)),  # as sitecustomize.py has it
    "log2": _of_float(np.log2),
    "max": _max,
    "max_constancy": _same,
    "max_contiguous": _same,
    "maximum": _maximum,
    "min": _min,
    "minimum": _minimum,
    "mul": lambda x, y, sanitize_overflow=True: as_value(x) * y,
    "multiple_of": _same,
    "num_programs": _num_programs,
    "program_id": _program_id,
    "range": _range,
    "reshape": _reshape,
    "rsqrt": _of_float(lambda x: 1 / np.sqrt(x)),
    "sin": _of_float(np.sin),
    "sqrt": _of_float(np.sqrt),
    "sqrt_rn": _of_float(np.sqrt),
    "static_assert": _assert,
    "static_range": _range,
    "store": memory.store,
    "sub": lambda x, y, sanitize_overflow=True: as_value(x) - y,
    "sum": _sum,
    "to_tensor": as_value,
    "umulhi": _umulhi,
    "where": select,
    "zeros": _zeros,
    "zeros_like": _zeros_like,
    **memory.ATOMICS,
}
