"""Declared replacements of single attributes: applied once, checked against what they rely on.

A module that is not imported yet is patched right after its import, so that declaring a patch costs
nothing and imports nothing.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any, ClassVar

logger = logging.getLogger("vllm.mtpc")

applied: dict[str, type[Patch]] = {}  # "module:attribute" -> the patch in force
problems: list[str] = []  # why a patch could not be applied; see refuse_problems


class PatchError(RuntimeError):
    """A patch that contradicts another one."""


class Patch(ABC):
    """One replaced attribute of vLLM. A subclass says what, why, and which parameters it relies on."""

    module: ClassVar[str]
    attribute: ClassVar[str]  # dotted, inside the module
    reason: ClassVar[str]
    parameters: ClassVar[tuple[str, ...] | None] = ()  # names the original must take; None: not a function

    @classmethod
    def key(cls) -> str:
        return f"{cls.module}:{cls.attribute}"

    @classmethod
    @abstractmethod
    def replace(cls, original: Any) -> Any:
        """The new value of the attribute; for what is not ours it does what `original` does."""


def apply(patch: type[Patch]) -> None:
    """Put a patch in force once; a second, different patch of the same attribute raises PatchError."""
    holder = applied.get(patch.key())
    if holder is patch:
        return
    if holder is not None:
        raise PatchError(f"{patch.key()} is already replaced by {holder.__name__}; {patch.__name__} would undo it")
    applied[patch.key()] = patch
    when_imported(patch.module, functools.partial(_patch_module, patch))


def _patch_module(patch: type[Patch]) -> None:
    owner: Any = sys.modules[patch.module]
    *path, name = patch.attribute.split(".")
    try:
        for part in path:
            owner = getattr(owner, part)
        original = inspect.getattr_static(owner, name)
    except AttributeError:
        _give_up(patch, "this vLLM has no such attribute")
        return
    function = original.__func__ if isinstance(original, staticmethod) else original
    if patch.parameters is not None:
        missing = set(patch.parameters) - set(inspect.signature(function).parameters)
        if missing:
            _give_up(patch, f"it no longer takes {', '.join(sorted(missing))}")
            return
    try:
        replacement = patch.replace(function)
    except Exception as error:  # it would be one of importing vLLM, also for who serves no head
        _give_up(patch, f"{type(error).__name__}: {error}")
        return
    if patch.parameters is not None:
        functools.update_wrapper(replacement, function)
    setattr(owner, name, staticmethod(replacement) if isinstance(original, staticmethod) else replacement)
    logger.debug("vllm_mtpc replaced %s: %s", patch.key(), patch.reason)


def refuse_problems() -> None:
    """Raises ServeConfigError where a patch could not be applied; every process that serves a head asks.

    Modules are imported in different processes, so each finds problems of its own.
    """
    refuse(problems)


def refuse(moved: list[str]) -> None:
    """Raises ServeConfigError that names what vLLM has moved, if anything."""
    if not moved:
        return
    from vllm_mtpc.errors import ServeConfigError
    from vllm_mtpc.proposers.seam import versions

    raise ServeConfigError(
        f"vLLM {versions.vllm_version()} has moved what vllm_mtpc hooks: {'; '.join(moved)}; "
        f"tested with vLLM {', '.join(versions.TESTED)}: install one of these"
    )


def _give_up(patch: type[Patch], why: str) -> None:
    problems.append(f"{patch.key()} ({why})")
    logger.debug("vllm_mtpc did not replace %s: %s", patch.key(), why)


class _AfterImport(MetaPathFinder):
    """Runs callbacks once a named module has been executed; leaves sys.meta_path when none is left."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}
        self._searching = False

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in self.waiting or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for callback in self.waiting.pop(fullname, ()):
                callback()
            if not self.waiting and self in sys.meta_path:
                sys.meta_path.remove(self)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_after_import = _AfterImport()


def when_imported(module: str, callback: Callable[[], None]) -> None:
    if _is_executed(module):
        callback()
        return
    if _after_import not in sys.meta_path:
        sys.meta_path.insert(0, _after_import)
    _after_import.waiting.setdefault(module, []).append(callback)


def _is_executed(name: str) -> bool:
    """Whether a module is imported to its end (one that is being imported may lack what is patched)."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return module is not None and not getattr(spec, "_initializing", False)
