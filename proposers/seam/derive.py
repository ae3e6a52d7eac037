"""Subclasses of vLLM's classes that are named in an engine's configuration, so that nothing of vLLM is replaced.

A class of ours (`HeadWorker`) derives from the class all of vLLM's share (`Worker`). Which of them runs depends on the
device and on what the user chose (`CPUWorker`), so the two are put together when it is known.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import TypeVar

from vllm.config.scheduler import SchedulerConfig

from vllm_mtpc.proposers.seam.patch import refuse

Head = TypeVar("Head")


@cache
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
    refuse(moved)
    return type(f"Head{theirs.__name__}", (ours, theirs), {"__module__": ours.__module__})


def _names(function: object) -> set[str]:
    """Parameters of a method by name, `self` among them; nothing for one that only passes on what it is given."""
    if not inspect.isfunction(function):
        return set()
    parameters = inspect.signature(function).parameters.items()
    named = {name for name, one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    return named if named != {"self"} or len(parameters) == 1 else set()


def name_in(module: str, theirs: str) -> str:
    """How a configuration names the class that `module` derives from `theirs`, "package.module.Class"; see `named`."""
    return f"{module}.{theirs.replace('.', ':')}"


def named(ours: type[Head], name: str) -> type[Head]:
    """The class of `name_in`: what a module's `__getattr__` answers vLLM, which looks the name up there."""
    if ":" not in name:
        raise AttributeError(name)
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return derived(ours, resolve_obj_by_qualname(name.replace(":", ".")))


class HeadSchedulerConfig(SchedulerConfig):
    """vLLM's, whose scheduler is derived from the one it would choose: its field `scheduler_cls` warns, and names one
    class for both synchronous and asynchronous scheduling."""

    def get_scheduler_cls(self) -> type:
        from vllm_mtpc.proposers.seam.scheduler import HeadScheduler

        return derived(HeadScheduler, super().get_scheduler_cls())
