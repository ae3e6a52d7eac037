"""Kernels and device functions as plain Python functions of `Value`s, each rewritten once."""

from __future__ import annotations

import ast
import builtins
import types
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import FunctionRewriter, InterpretedFunction
from triton.runtime.jit import ConstexprFunction

from numpy_interpreter import language
from numpy_interpreter.kinds import Unsupported
from numpy_interpreter.values import as_value


class _Language:
    """`tl`, `tl.math` and the other modules of Triton's language, all one."""

    def __getattr__(self, name: str) -> Any:
        value = language.NAMES.get(name)
        if value is None:
            original = getattr(tl, name, None)
            if isinstance(original, types.ModuleType):
                value = self
            elif isinstance(original, (tl.dtype, tl.constexpr, InterpretedFunction, ConstexprFunction, int, float)):
                value = converted(original)
            elif original is tl.pointer_type:
                value = original
            else:
                raise Unsupported(f"tl.{name}")
        setattr(self, name, value)
        return value


class _Module:
    """A module of device functions and constants."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return converted(getattr(self._module, name))


_LANGUAGE = _Language()
_FUNCTIONS: dict[Any, Function] = {}


def _is_language(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and value.__name__.startswith("triton.language")


class _Rewriter(FunctionRewriter):
    """Triton's rewriter, which converts assigned numbers to values; records the names that the source reads."""

    def __init__(self, function: types.FunctionType) -> None:
        super().__init__(function)
        self.source: ast.AST | None = None

    def _transform_ast(self, src: str) -> ast.AST:
        self.source = ast.parse(src)
        ast.increment_lineno(self.source, self.def_file_lineno - 1)
        return self.source

    def _compile_and_exec(self, transformed_ast: ast.AST) -> Any:
        return None


class _Assignments(ast.NodeTransformer):
    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if len(node.targets) > 1:
            raise Unsupported("a = b = c")
        self.generic_visit(node)
        if not isinstance(node.value, ast.Tuple):
            call = ast.Call(ast.Name("as_value", ast.Load()), [node.value], [])
            node.value = ast.fix_missing_locations(ast.copy_location(call, node.value))
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        if len(node.ops) > 1:
            raise Unsupported("a < b < c")
        return self.generic_visit(node)


class Function:
    """A kernel or device function. call: rewritten; read: its globals when it was made, (scope, name, value)."""

    def __init__(self, function: types.FunctionType) -> None:
        if function.__closure__:
            raise Unsupported("a function in a function")
        rewriter = _Rewriter(function)
        rewriter.rewrite_ast()
        if rewriter.source is None:
            raise Unsupported("no source")
        scope = function.__globals__
        names = {node.id for node in ast.walk(rewriter.source) if isinstance(node, ast.Name)} & scope.keys()
        self.read = [(scope, name, scope[name]) for name in names]
        self.called: list[Function] = []
        made = {name: self._converted(scope[name]) for name in names}
        for node in ast.walk(rewriter.source):  # tl.name, module.name: seen now, not while it runs
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = made.get(node.value.id)
                if isinstance(owner, _Language):
                    getattr(owner, node.attr)
                elif isinstance(owner, _Module):
                    module = owner._module
                    self.read.append((module.__dict__, node.attr, getattr(module, node.attr)))
                    setattr(owner, node.attr, self._converted(getattr(module, node.attr)))
        made |= {"as_value": as_value, "range": language.NAMES["range"], "__builtins__": builtins}
        tree = _Assignments().visit(rewriter.source)
        exec(compile(tree, rewriter.filename, "exec"), made)
        self.call = made[function.__name__]

    def _converted(self, value: Any) -> Any:
        made = converted(value)
        if isinstance(value, InterpretedFunction) and python_function(value) in _FUNCTIONS:
            self.called.append(function_of(value))
        return made

    def is_current(self) -> bool:
        """Whether the globals that it reads are unchanged since it was converted."""
        for scope, name, value in self.read:
            if scope.get(name) is not value:
                return False
        return all(function.is_current() for function in self.called)


def python_function(function: Any) -> types.FunctionType:
    """The Python function of a kernel."""
    while not isinstance(function, types.FunctionType):
        function = function.fn
    return function


def function_of(kernel: Any) -> Function:
    """Of a kernel or device function."""
    original = python_function(kernel)
    made = _FUNCTIONS.get(original)
    if made is None or not made.is_current():
        made = _FUNCTIONS[original] = Function(original)
    return made


def converted(value: Any) -> Any:
    """The replacement of a global that a kernel reads."""
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, InterpretedFunction):
        original = python_function(value)
        if original.__module__.startswith("triton.language") and original.__name__ in language.NAMES:
            return language.NAMES[original.__name__]
        return function_of(value).call
    if isinstance(value, ConstexprFunction):
        return value.fn
    if _is_language(value):
        return _LANGUAGE
    if isinstance(value, types.ModuleType) and value.__name__ not in ("math", "triton"):
        return _Module(value)
    return value
