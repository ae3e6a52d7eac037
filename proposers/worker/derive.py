"""Classes derived from vLLM's, and objects of vLLM that get their methods; both are checked against the installed vLLM.

A class of ours (`HeadWorker`) derives from the base class of vLLM's (`Worker`). The class that vLLM chooses depends on
the device and the user (`CPUWorker`): `derived` combines the two when it is known.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar, cast

from vllm_mtpc.proposers.options.versions import refuse_moved

Ours = TypeVar("Ours")


@functools.cache
def derived(ours: type[Ours], theirs: type) -> type[Ours]:
    """Return `theirs` with the methods of `ours` in front; ServeConfigError: it lacks a parameter that they pass on."""
    moved = []
    for name, method in vars(ours).items():
        if not inspect.isfunction(method) or not any(hasattr(base, name) for base in ours.__bases__):
            continue
        takes = next((found for one in theirs.__mro__ if (found := _names(vars(one).get(name)))), set())
        if missing := _names(method) - takes:
            where = f"{theirs.__module__}:{theirs.__qualname__}.{name}"
            moved.append(f"{where} (it no longer takes {', '.join(sorted(missing))})")
    refuse_moved(moved)
    return type(f"Head{theirs.__name__}", (ours, theirs), {"__module__": ours.__module__})


def extend_object(theirs: Any, ours: type[Ours]) -> Ours:
    """Give an object that vLLM made the methods of `ours`, a subclass of its class; return it.

    Extended so: `scheduler_config`, the scheduler's `structured_output_manager`, the worker's model runner, V1's holder
    of thinking budgets, V2's sampler and its `sampling_states`. Raises ServeConfigError if vLLM made another class.
    """
    if not issubclass(ours, type(theirs)):
        refuse_moved([f"{type(theirs).__module__}:{type(theirs).__qualname__} (it is no base of {ours.__name__})"])
    theirs.__class__ = ours
    return cast(Ours, theirs)


def _names(function: object) -> set[str]:
    """Return the parameters of a method by name; empty for one that only passes on its arguments."""
    if not inspect.isfunction(function):
        return set()
    parameters = inspect.signature(function).parameters.items()
    named = {name for name, one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)}
    return named if named != {"self"} or len(parameters) == 1 else set()
