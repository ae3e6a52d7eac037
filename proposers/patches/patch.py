"""Patches of vLLM's attributes, checked against the installed vLLM."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from typing import Any, ClassVar

from vllm_mtpc.proposers.options import versions
from vllm_mtpc.proposers.options.switches import logger

applied: dict[str, Patch] = {}  # by "module:attribute"
problems: list[str] = []  # patches that could not be applied, for refuse_moved


@dataclass(frozen=True, eq=False)
class Patch:
    """A replaced attribute of vLLM.

    Attributes:
        module, attribute: the module, and the attribute's dotted name inside it.
        function: called as function(original, *args, **kwargs) in place of a function. If `needs` is None, the
            attribute becomes function(original).
        needs: parameters that the original must have.
        since: the first minor release of vLLM with the attribute.
    """

    module: str
    attribute: str
    function: Callable[..., Any]
    needs: tuple[str, ...] | None
    since: tuple[int, int]

    @property
    def key(self) -> str:
        return f"{self.module}:{self.attribute}"

    def replace(self, original: Any) -> Any:
        if self.needs is None:
            return self.function(original)
        if "." not in self.attribute:  # of a module: called at every step, and partial is faster
            return functools.update_wrapper(functools.partial(self.function, original), original)
        return functools.wraps(original)(lambda *args, **kwargs: self.function(original, *args, **kwargs))


def patch(
    module: str, attribute: str, needs: tuple[str, ...] | None = None, since: tuple[int, int] = (0, 0)
) -> Callable[[Callable[..., Any]], Patch]:
    """Make a Patch of the decorated function, whose docstring is the reason."""
    return lambda function: Patch(module, attribute, function, needs, since)


def apply(*patches: Patch) -> None:
    """Apply the patches that exist in the installed vLLM, each once."""
    for one in patches:
        if one.key not in applied and versions.vllm_minor() >= one.since:
            applied[one.key] = one
            when_imported(one.module, functools.partial(_patch_module, one))


def _patch_module(patch: Patch) -> None:
    *path, name = patch.attribute.split(".")
    try:
        owner = functools.reduce(getattr, path, sys.modules[patch.module])
        original = inspect.getattr_static(owner, name)
        function = original.__func__ if isinstance(original, staticmethod) else original
        if patch.needs and (missing := set(patch.needs) - set(inspect.signature(function).parameters)):
            raise TypeError(f"it no longer takes {', '.join(sorted(missing))}")
        replacement = patch.replace(function)
    except Exception as error:  # raising here would fail vLLM's import, with or without a head
        problems.append(f"{patch.key} ({type(error).__name__}: {error})")
        return
    setattr(owner, name, staticmethod(replacement) if isinstance(original, staticmethod) else replacement)
    logger.debug("vllm_mtpc replaced %s", patch.key)


# raises ServeConfigError that names the patches that could not be applied
refuse_moved = functools.partial(versions.refuse_moved, problems)


class _AfterImport(MetaPathFinder):
    waiting: ClassVar[dict[str, list[Callable[[], None]]]] = {}  # by module

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

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_after_import = _AfterImport()


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """Call back once a module is imported completely, at once if it already is."""
    found = sys.modules.get(module)
    if found is not None and not getattr(getattr(found, "__spec__", None), "_initializing", False):
        callback()
        return
    if _after_import not in sys.meta_path:
        sys.meta_path.insert(0, _after_import)
    _after_import.waiting.setdefault(module, []).append(callback)
