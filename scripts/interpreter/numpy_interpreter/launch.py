"""Launches: arguments, the grid, and the way back to Triton's interpreter."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import _normalize_ty

from numpy_interpreter import lanes, language, memory
from numpy_interpreter.functions import Function, function_of, python_function
from numpy_interpreter.kinds import BOOL, UINT32, Unsupported, number_kind, pointer_kind
from numpy_interpreter.values import Value

tritons_run = InterpretedFunction.run
fallen_back: dict[Any, str] = {}  # kernel's function: why
is_at_once = False  # set by install: MTPC_INTERPRETER=lanes
one_by_one: dict[Any, str] = {}  # kernel's function: why its instances do not run at once
MIN_BLOCK = 32  # elements: kernels divide a block into words of bits
PASS = 4  # instances that run one after the other as fast as all of a launch at once
passes: dict[Any, int] = {}  # kernel's function: of its last launch at once, one for each way that instances went
MOST_WAYS = 16  # or a quarter of the instances


class _Signature:
    """Names, constexpr names and defaults of a kernel's parameters."""

    def __init__(self, function: Any) -> None:
        parameters = inspect.signature(function).parameters.values()
        annotations = {name: _normalize_ty(ty) for name, ty in inspect.get_annotations(function).items()}
        self.names = [parameter.name for parameter in parameters]
        self.constants = {name for name in self.names if annotations.get(name) == "constexpr"}
        self.defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name; options of the launch (num_warps) are none."""
        given = dict(zip(self.names, args, strict=False))
        given.update((name, value) for name, value in kwargs.items() if name in self.names)
        for name, value in self.defaults.items():
            given.setdefault(name, value)
        if len(given) != len(self.names):
            raise Unsupported("arguments are missing")
        return given


_SIGNATURES: dict[Any, _Signature] = {}


def signature_of(function: Any) -> _Signature:
    """Of a kernel's function."""
    signature = _SIGNATURES.get(function)
    if signature is None:
        signature = _SIGNATURES[function] = _Signature(function)
    return signature


def _as_argument(argument: Any, is_constant: bool) -> Any:
    if isinstance(argument, InterpretedFunction):
        return function_of(argument).call
    if is_constant or argument is None or isinstance(argument, float):
        return argument
    if isinstance(argument, tuple):
        return type(argument)(*(_as_argument(part, is_constant) for part in argument))
    if hasattr(argument, "untyped_storage"):
        if argument.device.type != "cpu":
            raise Unsupported("a tensor that is not on the CPU")
        return memory.pointer_to(argument, pointer_kind(argument))
    if isinstance(argument, (bool, int)):
        kind = number_kind(argument)
        if kind is UINT32:
            raise Unsupported("an integer from 2^31 to 2^32")
        return Value(np.bool_(argument) if kind is BOOL else kind.constant(argument), kind)
    raise Unsupported(f"an argument of type {type(argument).__name__}")


def interpret(kernel: InterpretedFunction, args: tuple, grid: Any, kwargs: dict[str, Any]) -> None:
    """Runs a kernel here, or raises; `memory.has_written` says whether it has written."""
    memory.has_written = False
    original = python_function(kernel)
    if kernel.pre_run_hooks:
        raise Unsupported("hooks")
    function: Function = function_of(kernel)
    signature = signature_of(original)
    given = signature.bind(args, kwargs)
    if is_at_once:
        _shrink_block(given)
    sizes = grid(given) if callable(grid) else grid
    sizes = tuple(int(size) for size in sizes) + (1,) * (3 - len(sizes))
    arguments = [_as_argument(given[name], name in signature.constants) for name in signature.names]
    language.grid = sizes
    call = function.call
    with np.errstate(all="ignore"):
        count = sizes[0] * sizes[1] * sizes[2]
        if is_at_once and original not in one_by_one and count >= PASS * passes.get(original, 1):
            try:
                passes[original] = _at_once(call, arguments, sizes, _widest(given))
                return
            except Exception as error:
                one_by_one[original] = repr(error)
                memory.has_written = False
        for x in range(sizes[0]):
            for y in range(sizes[1]):
                for z in range(sizes[2]):
                    language.instance = (x, y, z)
                    call(*arguments)


def _shrink_block(given: dict[str, Any]) -> None:
    """Reduce a block that holds a whole vocabulary to the power of two above its size."""
    name, size = "LOGITS_BLOCK_SIZE" if "LOGITS_BLOCK_SIZE" in given else "BLOCK_SIZE", given.get("vocab_size")
    if size is not None and name in given:
        given[name] = min(given[name], max(MIN_BLOCK, 1 << (int(size) - 1).bit_length()))


def _widest(given: dict[str, Any]) -> int:
    """Elements of the largest block, by the constants that are named so."""
    named = [given, *(value._asdict() for value in given.values() if hasattr(value, "_asdict"))]
    sizes = [value for group in named for name, value in group.items() if "BLOCK" in name and isinstance(value, int)]
    return max(sizes, default=64)


def _at_once(call: Any, arguments: list[Any], sizes: tuple[int, int, int], widest: int) -> int:
    """Run every operation once for all instances of a pass; undo the writes if that fails. Returns the passes."""
    everything = lanes.Written()
    try:
        return sum(_go(call, arguments, ids, everything) for ids in lanes.in_goes(lanes.instances(sizes), widest))
    except Exception:
        everything.undo()
        raise
    finally:
        memory.written = None


def _go(call: Any, arguments: list[Any], ids: np.ndarray, everything: lanes.Written) -> int:
    language.instance, memory.written = ids, lanes.Written()
    try:
        call(*arguments)
    except lanes.Parted as parted:
        memory.written.undo()
        ways = np.unique(parted.values)
        if len(ways) > max(MOST_WAYS, len(ids) // 4):
            raise Unsupported("each instance goes its own way") from parted
        return 1 + sum(_go(call, arguments, ids[parted.values == value], everything) for value in ways)
    except Exception:
        memory.written.undo()
        raise
    everything.stores += memory.written.stores
    memory.has_written = True
    return 1


def run(kernel: InterpretedFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In the place of `InterpretedFunction.run`."""
    if warmup:
        return
    original = python_function(kernel)
    reason = None
    if original not in fallen_back:
        try:
            return interpret(kernel, args, grid, kwargs)
        except Exception as error:
            if memory.has_written:
                raise InterpreterError(repr(error)) from error
            reason = repr(error)
    tritons_run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
    if reason:  # and Triton's own did not raise
        fallen_back[original] = reason
