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
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from vllm_mtpc.proposers.config import versions

logger = logging.getLogger("vllm.mtpc")

applied: dict[str, Patch] = {}  # "module:attribute" -> the patch in force
problems: list[str] = []  # why a patch could not be applied; see refuse_problems


@dataclass(frozen=True, eq=False)
class Patch:
    """One replaced attribute of vLLM: what `function(original, *args, **kwargs)` returns is what a call of it returns.

    An attribute that is no function has needs None, and becomes `function(original)`.
    """

    module: str
    attribute: str  # dotted, inside the module
    function: Callable[..., Any]
    needs: tuple[str, ...] | None  # parameters that the original must take
    why: str
    since: tuple[int, int]  # the first minor release of vLLM that has it

    @property
    def key(self) -> str:
        return f"{self.module}:{self.attribute}"

    def replace(self, original: Any) -> Any:
        """The new value of the attribute."""
        if self.needs is None:
            return self.function(original)
        function = self.function
        if "." not in self.attribute:  # a function of a module, which may be called at every step
            return functools.update_wrapper(functools.partial(function, original), original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replacement


def patch(
    module: str, attribute: str, needs: tuple[str, ...] | None = None, *, why: str, since: tuple[int, int] = (0, 0)
) -> Callable[[Callable[..., Any]], Patch]:
    """Declares the decorated function as a patch; `apply` puts it in force."""
    return lambda function: Patch(module, attribute, function, needs, why, since)


def declared(*files: ModuleType, minor: tuple[int, int] | None = None) -> list[Patch]:
    """The patches that these modules declare for a minor release of vLLM (None: the one that is installed)."""
    minor = minor or versions.vllm_minor()
    every = (value for file in files for value in vars(file).values())
    return [one for one in every if isinstance(one, Patch) and minor >= one.since]


def apply(*patches: Patch) -> None:
    """Put patches in force, each once; a second, different patch of the same attribute raises RuntimeError."""
    for one in patches:
        holder = applied.get(one.key)
        if holder is None:
            applied[one.key] = one
            when_imported(one.module, functools.partial(_patch_module, one))
        elif holder is not one:
            ours, theirs = one.function.__name__, holder.function.__name__
            raise RuntimeError(f"{one.key} is already replaced by {theirs}; {ours} would undo it")


def _patch_module(patch: Patch) -> None:
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
    if patch.needs and (missing := set(patch.needs) - set(inspect.signature(function).parameters)):
        _give_up(patch, f"it no longer takes {', '.join(sorted(missing))}")
        return
    try:
        replacement = patch.replace(function)
    except Exception as error:  # it would be one of importing vLLM, also for who serves no head
        _give_up(patch, f"{type(error).__name__}: {error}")
        return
    setattr(owner, name, staticmethod(replacement) if isinstance(original, staticmethod) else replacement)
    logger.debug("vllm_mtpc replaced %s: %s", patch.key, patch.why)


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

    raise ServeConfigError(
        f"vLLM {versions.vllm_version()} has moved what vllm_mtpc hooks: {'; '.join(moved)}; "
        f"tested with vLLM {', '.join(versions.TESTED)}: install one of these"
    )


def _give_up(patch: Patch, why: str) -> None:
    problems.append(f"{patch.key} ({why})")
    logger.debug("vllm_mtpc did not replace %s: %s", patch.key, why)


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
