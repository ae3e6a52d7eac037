"""Two ways to change vLLM, both checked against what they rely on: patches of single attributes, derived classes.

A patch is declared, and applied once. A module that is not imported yet is patched right after its import, so that
declaring one costs nothing and imports nothing.

A class of ours (`HeadWorker`) derives from the class all of vLLM's share (`Worker`), and a configuration names it.
Which of vLLM's runs depends on the device and the user (`CPUWorker`): the two are put together when it is known.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, TypeVar

from vllm_mtpc.proposers.config import versions

Head = TypeVar("Head")
logger = logging.getLogger("vllm.mtpc")

applied: dict[str, Patch] = {}  # "module:attribute" -> the patch in force
problems: list[str] = []  # why a patch could not be applied; see refuse_moved


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
    why_not = _replaced(patch)
    if why_not:
        problems.append(f"{patch.key} ({why_not})")
    logger.debug("vllm_mtpc %s %s: %s", "did not replace" if why_not else "replaced", patch.key, why_not or patch.why)


def _replaced(patch: Patch) -> str:
    """Put a patch in force; returns why that is not possible, if it is not."""
    *path, name = patch.attribute.split(".")
    try:
        owner = functools.reduce(getattr, path, sys.modules[patch.module])
        original = inspect.getattr_static(owner, name)
    except AttributeError:
        return "this vLLM has no such attribute"
    function = original.__func__ if isinstance(original, staticmethod) else original
    if patch.needs and (missing := set(patch.needs) - set(inspect.signature(function).parameters)):
        return f"it no longer takes {', '.join(sorted(missing))}"
    try:
        replacement = patch.replace(function)
    except Exception as error:  # it would be one of importing vLLM, also for who serves no head
        return f"{type(error).__name__}: {error}"
    setattr(owner, name, staticmethod(replacement) if isinstance(original, staticmethod) else replacement)
    return ""


def refuse_moved(moved: list[str] | None = None) -> None:
    """Raises ServeConfigError that names what vLLM has moved, if anything; None: patches that could not be applied.

    Modules are imported in different processes, so each that serves a head asks, and finds problems of its own.
    """
    moved = problems if moved is None else moved
    if not moved:
        return
    from vllm_mtpc.errors import ServeConfigError

    raise ServeConfigError(
        f"vLLM {versions.vllm_version()} has moved what vllm_mtpc hooks: {'; '.join(moved)}; "
        f"tested with vLLM {', '.join(versions.TESTED)}: install one of these"
    )


@functools.cache
def derived(ours: type[Head], theirs: type) -> type[Head]:
    """`theirs` with the methods of `ours` in front, which call vLLM's with super().

    Raises ServeConfigError where a method of `theirs` no longer takes what the one of `ours` passes on.
    """
    moved = []
    for name, method in vars(ours).items():
        if not inspect.isfunction(method) or not any(hasattr(base, name) for base in ours.__bases__):
            continue
        where = f"{theirs.__module__}:{theirs.__qualname__}.{name}"
        takes = next((found for one in theirs.__mro__ if (found := _names(vars(one).get(name)))), set())
        if not takes:
            moved.append(f"{where} (this vLLM has no such attribute)")
        elif missing := _names(method) - takes:
            moved.append(f"{where} (it no longer takes {', '.join(sorted(missing))})")
    refuse_moved(moved)
    return type(f"Head{theirs.__name__}", (ours, theirs), {"__module__": ours.__module__})


def named(ours: type, name: str) -> type:
    """What a module's `__getattr__` answers vLLM, which looks up there the "module:Class" that `ours` derives from."""
    if ":" not in name:
        raise AttributeError(name)
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return derived(ours, resolve_obj_by_qualname(name.replace(":", ".")))


def _names(function: object) -> set[str]:
    """Parameters of a method by name, `self` among them; nothing for one that only passes on what it is given."""
    if not inspect.isfunction(function):
        return set()
    parameters = inspect.signature(function).parameters.items()
    named = {name for name, one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    return named if named != {"self"} or len(parameters) == 1 else set()


class _AfterImport(MetaPathFinder):
    """Runs callbacks once a named module has been executed; leaves sys.meta_path when none is left."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callable[[], None]]] = {}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in self.waiting:
            return None
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
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
    """Call back once a module is imported to its end: one that is being imported may lack what is patched."""
    found = sys.modules.get(module)
    if found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False):
        callback()
        return
    if _after_import not in sys.meta_path:
        sys.meta_path.insert(0, _after_import)
    _after_import.waiting.setdefault(module, []).append(callback)
