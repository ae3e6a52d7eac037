"""Types of values, what numpy holds them as, and how one becomes another: Triton's rules, each looked up once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.jit import mangle_type

BASE = 1 << 16  # address of element 0 of `memory.cells`; a pointer is the index of an element there

Data = Any  # a numpy array, or a numpy scalar for what has no shape


class Unsupported(Exception):
    """A feature that this interpreter does not have; Triton's own may."""


class Kind:
    """A type of Triton's, one object for each: compared by identity.

    triton: the type itself. dtype: numpy's, as in Triton's interpreter (bfloat16 is uint16, float8 is uint8); int64 for
    a pointer. element: the type that a pointer points to. accepts: Python numbers that are promoted to this type.
    """

    __slots__ = ("accepts", "constants", "dtype", "element", "is_float", "is_int", "is_plain", "is_signed", "triton")

    def __init__(self, triton: tl.dtype, element: Kind | None = None) -> None:
        self.triton, self.element = triton, element
        self.dtype = np.dtype(np.int64) if element else triton_interpreter._get_np_dtype(triton)
        self.is_int, self.is_float = not element and triton.is_int(), not element and triton.is_floating()
        self.is_signed = self.is_int and triton.is_int_signed()
        self.is_plain = triton is not tl.int1  # numpy's arithmetic on bool is not Triton's
        self.accepts: tuple[type, ...] = (bool, int, float)[: 3 if self.is_float else 2 if self.is_plain else 1]
        self.constants: dict[Any, Data] = {}

    def constant(self, number: float) -> Data:
        """A Python number as this type."""
        key = "-0" if not number and self.is_float and str(number)[0] == "-" else number  # 0.0 and -0.0 are one key
        made = self.constants.get(key)
        if made is None:
            made = self.constants[key] = self._made(number)
        return made

    def _made(self, number: float) -> Data:
        if self.triton is tl.bfloat16:
            return cast(np.float32(number), FLOAT32, self)
        if self.is_float and self.dtype.kind != "f":
            raise Unsupported(f"a constant of type {self.triton}")
        if self.is_int and number == 0:
            number = 0
        return np.array([number], dtype=self.dtype)[0]


_INTEGERS = (tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64)
_FLOATS = (tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e5, tl.float8e5b16, tl.float8e4nv, tl.float8e4b8)
KINDS: dict[str, Kind] = {dtype.name: Kind(dtype) for dtype in _INTEGERS + _FLOATS}
BOOL, INT8, INT32, INT64 = KINDS["int1"], KINDS["int8"], KINDS["int32"], KINDS["int64"]
UINT32, UINT64, FLOAT32, FLOAT64 = KINDS["uint32"], KINDS["uint64"], KINDS["fp32"], KINDS["fp64"]
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127


def kind_of(dtype: tl.dtype) -> Kind:
    """Of a type of Triton's."""
    kind = KINDS.get(dtype.name)
    if kind is None:
        if not dtype.is_ptr():
            raise Unsupported(f"type {dtype}")
        kind = KINDS[dtype.name] = Kind(dtype, kind_of(dtype.element_ty))
    return kind


_POINTERS: dict[Any, Kind] = {}


def pointer_kind(tensor: Any) -> Kind:
    """Of a pointer to the elements of a tensor."""
    kind = _POINTERS.get(tensor.dtype)
    if kind is None:
        kind = _POINTERS[tensor.dtype] = kind_of(tl.str_to_ty(mangle_type(tensor), None))
    return kind


def number_kind(number: float) -> Kind:
    """The type that a Python number has by itself."""
    if isinstance(number, bool):
        return BOOL
    if isinstance(number, int):
        if -(2**31) <= number < 2**31:
            return INT32
        return UINT32 if 0 <= number < 2**32 else INT64 if -(2**63) <= number < 2**63 else UINT64
    size = abs(number)
    is_single = size == 0 or size != size or size == float("inf") or _SMALLEST <= size <= _LARGEST
    return FLOAT32 if is_single else FLOAT64


_COMMON: dict[tuple, Kind] = {}


def common_kind(a: Kind, b: Kind, a_is_number: bool, b_is_number: bool, is_division: bool) -> Kind:
    """The type that an operation on both computes in."""
    key = (a, b, a_is_number, b_is_number, is_division)
    kind = _COMMON.get(key)
    if kind is None:
        if a.element or b.element:
            if a.element and b.element and a is not b:
                raise Unsupported(f"{a.triton} with {b.triton}")
            kind = a if a.element else b
        else:
            semantic = triton_interpreter.interpreter_semantic
            dtype = semantic.computation_type_impl(a.triton, a_is_number, b.triton, b_is_number, is_division)
            kind = kind_of(dtype)
        _COMMON[key] = kind
    return kind


_CASTS: dict[tuple[Kind, Kind], Callable[[Data], Data]] = {}


def cast(data: Data, source: Kind, target: Kind) -> Data:
    """Data of one type as another."""
    return data if source is target else converter(source, target)(data)


def converter(source: Kind, target: Kind) -> Callable[[Data], Data]:
    """What turns data of one type into another."""
    convert = _CASTS.get((source, target))
    if convert is None:
        convert = _CASTS[source, target] = _cast(source, target)
    return convert


def _cast(source: Kind, target: Kind) -> Callable[[Data], Data]:
    if source.element or target.element:
        return _pointer_cast(source, target)
    a, b = source.triton, target.triton
    if a.is_fp8() or b.is_fp8() or (a.is_fp16() and b.is_bf16()) or (a.is_bf16() and b.is_fp16()):
        return _float8_cast(source, target)
    if (a.is_fp16() or a.is_bf16()) and not b.is_fp32():
        return lambda data: cast(cast(data, source, FLOAT32), FLOAT32, target)
    if target is BOOL:
        zero = source.constant(0)
        return lambda data: data != zero
    if a.is_bf16():
        return _bfloat16_to_float32
    if a.is_fp32() and b.is_bf16():
        return _float32_to_bfloat16
    dtype = target.dtype
    return lambda data: data.astype(dtype)


def _pointer_cast(source: Kind, target: Kind) -> Callable[[Data], Data]:
    if source.element and target.element:
        return lambda data: to_index(to_address(data, source), target)
    if target.element and source.is_int:
        return lambda data: to_index(data.astype(np.int64), target)
    if source.element and target in (INT64, UINT64):
        return lambda data: to_address(data, source).astype(target.dtype)
    raise Unsupported(f"{source.triton} as {target.triton}")


def to_address(index: Data, pointer: Kind) -> Data:
    """Addresses, int64, of what pointers point to."""
    return index * pointer.element.dtype.itemsize + BASE


def to_index(address: Data, pointer: Kind) -> Data:
    """Pointers to what lies at addresses (int64)."""
    size = pointer.element.dtype.itemsize
    if size > 1 and np.any((address & (size - 1)) != 0):
        raise Unsupported(f"an address that {pointer.element.triton} is not aligned to")
    return (address - BASE) // size


def _float8_cast(source: Kind, target: Kind) -> Callable[[Data], Data]:
    """Float8 to or from another float, and between the halves: Triton's own function."""
    a, b = source.triton, target.triton
    if not (source.is_float and target.is_float):
        raise Unsupported(f"{a} as {b}")
    if not (a.is_fp8() or b.is_fp8()):
        return lambda data: cast(cast(data, source, FLOAT32), FLOAT32, target)
    rounding = ir.ROUNDING_MODE.RTNE if b.primitive_bitwidth < a.primitive_bitwidth else None

    def convert(data: Data) -> Data:
        converted = triton_interpreter._convert_float(np.asarray(data), a, b, rounding).view(target.dtype)
        return converted if converted.ndim else converted[()]

    if a.primitive_bitwidth > 8:
        return convert
    table = convert(np.arange(256, dtype=np.uint8))
    return lambda data: table[data]


def _bfloat16_to_float32(data: Data) -> Data:
    wide = data.astype(np.uint32) << np.uint32(16)
    if np.any((wide & 0x7F800000 == 0) & (wide & 0x7FFFFFFF != 0)):  # subnormal: Triton's way
        return _converted(data, tl.bfloat16, tl.float32, np.float32)
    return wide.view(np.float32)


def _float32_to_bfloat16(data: Data) -> Data:
    """Truncate, as Triton's interpreter does."""
    bits = data.view(np.uint32)
    if np.any((bits & 0x7F800000 == 0) & (bits & 0x7FFFFFFF != 0)):
        return _converted(data, tl.float32, tl.bfloat16, np.uint16)
    return (bits >> np.uint32(16)).astype(np.uint16)


def _converted(data: Data, source: tl.dtype, target: tl.dtype, dtype: type) -> Data:
    converted = triton_interpreter._convert_float(np.asarray(data), source, target, None).view(dtype)
    return converted if converted.ndim else converted[()]
