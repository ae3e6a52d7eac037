"""The values of a kernel: `Value`, with the operators of Triton's tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from numpy_interpreter.kinds import (
    BOOL,
    FLOAT32,
    Data,
    Kind,
    Unsupported,
    cast,
    common_kind,
    converter,
    kind_of,
    number_kind,
)
from numpy_interpreter.lanes import Lanes

Number = bool | int | float
_WHOLE = slice(None)


class Value:
    """Data of one type. What has a shape is an array, a scalar is one of numpy's; data are never changed in place."""

    __slots__ = ("data", "kind")
    __hash__ = None

    def __init__(self, data: Data, kind: Kind) -> None:
        self.data = data
        self.kind = kind

    def __getattr__(self, name: str) -> Any:
        raise Unsupported(f"tensor.{name}")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def numel(self) -> int:
        return self.data.size

    @property
    def dtype(self) -> Any:
        return self.kind.triton

    def to(self, dtype: Any, fp_downcast_rounding: None = None, bitcast: bool = False) -> Value:
        if fp_downcast_rounding is not None:
            raise Unsupported("fp_downcast_rounding")
        kind = kind_of(dtype)
        if kind is self.kind:
            return self
        if not bitcast or kind.element or self.kind.element:
            return Value(cast(self.data, self.kind, kind), kind)
        if kind.triton.primitive_bitwidth != self.kind.triton.primitive_bitwidth:
            raise Unsupported(f"{self.kind.triton} bitcast to {kind.triton}")
        return Value(self.data.view(kind.dtype), kind)

    def reshape(self, *shape: Any) -> Value:
        return Value(self.data.reshape(*shape), self.kind)

    def __index__(self) -> int:
        return int(self.data)

    def __bool__(self) -> bool:
        return bool(self.data) if self.data.size == 1 else True  # Triton's interpreter, too, takes a block for true

    def __getitem__(self, index: Any) -> Value:
        index = index if isinstance(index, tuple) else (index,)
        for part in index:
            if part is not None and part != _WHOLE:
                raise Unsupported(f"tensor[{index}]")
        data = self.data if self.data.__class__ is Lanes else np.asarray(self.data)
        return Value(data[index], self.kind)

    def __neg__(self) -> Value:
        if self.kind.is_float:
            return Value(np.negative(self.data), self.kind)
        return Value(self.kind.constant(0), self.kind) - self

    def __invert__(self) -> Value:
        if not self.kind.is_int:
            raise Unsupported(f"~ of {self.kind.triton}")
        return Value(~self.data, self.kind)

    def logical_and(self, other: Value) -> Value:
        return as_value(self).to(BOOL.triton, bitcast=True) & as_value(other).to(BOOL.triton, bitcast=True)

    def logical_or(self, other: Value) -> Value:
        return as_value(self).to(BOOL.triton, bitcast=True) | as_value(other).to(BOOL.triton, bitcast=True)


def as_value(x: Any) -> Any:
    """Convert a Python number to a value, as Triton does with assigned numbers; return anything else unchanged."""
    if x.__class__ is Value or not isinstance(x, (bool, int, float)):
        return x
    kind = number_kind(x)
    return Value(kind.constant(x), kind)


Plan = tuple[Kind, Callable[[Data], Data] | None, Callable[[Data], Data] | None]
_PLANS: dict[tuple[Kind, Kind, bool], Plan] = {}


def _plan(a: Kind, b: Kind, is_division: bool) -> Plan:
    """The type that an operation on two values computes in, and what makes this type of each; None: it has it."""
    plan = _PLANS.get((a, b, is_division))
    if plan is None:
        kind = common_kind(a, b, False, False, is_division)
        plan = _PLANS[a, b, is_division] = (kind, _as_operand(a, kind), _as_operand(b, kind))
    return plan


def _as_operand(source: Kind, kind: Kind) -> Callable[[Data], Data] | None:
    if kind.element and not source.element:  # an offset
        return None if source.dtype == np.int64 else lambda data: data.astype(np.int64)
    return None if source is kind else converter(source, kind)


def operands(a: Value | Number, b: Value | Number, is_division: bool = False) -> tuple[Data, Data, Kind]:
    """Data of both in the type that an operation on them computes in."""
    a_is_number, b_is_number = a.__class__ is not Value, b.__class__ is not Value
    if not (a_is_number or b_is_number):
        kind, of_a, of_b = _plan(a.kind, b.kind, is_division)
        return a.data if of_a is None else of_a(a.data), b.data if of_b is None else of_b(b.data), kind
    a_kind = number_kind(a) if a_is_number else a.kind
    b_kind = number_kind(b) if b_is_number else b.kind
    kind = common_kind(a_kind, b_kind, a_is_number, b_is_number, is_division)
    x = kind.constant(a) if a_is_number else _converted(a, kind)
    y = kind.constant(b) if b_is_number else _converted(b, kind)
    return x, y, kind


def _converted(x: Value, kind: Kind) -> Data:
    if kind.element and not x.kind.element:
        return x.data.astype(np.int64)
    return cast(x.data, x.kind, kind)


def _of_bools(operation: Callable[[Data, Data], Data]) -> Callable[[Data, Data], Data]:
    """On int1 as a number of one bit."""
    return lambda x, y: (operation(x.astype(np.int8), y.astype(np.int8)) & 1).astype(np.bool_)


def _define(name: str, operation: Callable[[Data, Data], Data], result: Kind | None = None, is_bitwise: bool = False):
    """Gives Value an operator, here and reflected. is_bitwise: numpy does with bools what Triton does.

    Most operations have both operands of one type, or one number that takes the other's: those take the short way.
    """
    of_bools = operation if is_bitwise or result else _of_bools(operation)
    any_kind = is_bitwise or result is not None

    def forward(a: Value, b: Value | Number) -> Value:
        kind = a.kind
        if kind.is_plain or any_kind:
            if b.__class__ is Value:
                if b.kind is kind:
                    return Value(operation(a.data, b.data), result or kind)
            elif b.__class__ in kind.accepts:
                return Value(operation(a.data, kind.constant(b)), result or kind)
        x, y, kind = operands(a, b)
        return Value((operation if kind.is_plain else of_bools)(x, y), result or kind)

    def reflected(b: Value, a: Number) -> Value:
        x, y, kind = operands(a, b)
        return Value((operation if kind.is_plain else of_bools)(x, y), result or kind)

    setattr(Value, f"__{name}__", forward)
    if result is None:
        setattr(Value, f"__r{name}__", reflected)


for _name in ("add", "sub", "mul"):
    _define(_name, getattr(operator, _name))
for _name, _operation in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
    _define(_name, _operation, is_bitwise=True)
_define("lshift", operator.lshift)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _define(_name, getattr(operator, _name), BOOL)


def divide(a: Value | Number, b: Value | Number) -> Value:
    """a / b; of integers in float32."""
    x, y, kind = operands(a, b, is_division=True)
    if kind.is_int:
        return Value(cast(x, kind, FLOAT32) / cast(y, kind, FLOAT32), FLOAT32)
    return Value(x / y, kind)


def floor_divide(a: Value | Number, b: Value | Number) -> Value:
    """a // b of integers, towards zero."""
    x, y, kind = operands(a, b, is_division=True)
    if not kind.is_int:
        raise Unsupported("// of floats")
    if x.ndim + y.ndim == 0 and x >= 0 and y > 0:
        return Value(x // y, kind)
    return Value((x - np.fmod(x, y)) // y, kind)


def modulo(a: Value | Number, b: Value | Number) -> Value:
    """a % b with the sign of a."""
    x, y, kind = operands(a, b, is_division=True)
    if kind.is_int and x.ndim + y.ndim == 0 and x >= 0 and y > 0:
        return Value(x % y, kind)
    return Value(np.fmod(x, y), kind)


def shift_right(a: Value | Number, b: Value | Number) -> Value:
    """a >> b, with the sign where the value (the left one, where both are) is signed."""
    x, y, kind = operands(a, b)
    if kind.is_signed is not (a if a.__class__ is Value else b).kind.is_signed:
        raise Unsupported(">> of signed and unsigned integers")
    return Value(x >> y, kind)


for _name, _function in {"truediv": divide, "floordiv": floor_divide, "mod": modulo, "rshift": shift_right}.items():
    setattr(Value, f"__{_name}__", _function)
    setattr(Value, f"__r{_name}__", lambda b, a, function=_function: function(a, b))


def select(condition: Value | Number, a: Value | Number, b: Value | Number) -> Value:
    """a where the condition holds, else b."""
    condition = as_value(condition)
    chosen = cast(condition.data, condition.kind, BOOL)
    x, y, kind = operands(a, b)
    if chosen.ndim + x.ndim + y.ndim == 0 and chosen.__class__ is not Lanes:
        return Value(x if chosen else y, kind)
    return Value(np.where(chosen, x, y), kind)
