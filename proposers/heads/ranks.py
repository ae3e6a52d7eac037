"""Tensor-parallel ranks that agree on the success of a phase before any of them enters its collectives.

A bundled head that fails on one rank before the first request is given up on all: they serve the target without it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from vllm.distributed import get_tp_group, model_parallel_is_initialized

from vllm_mtpc.proposers.config.switches import logger, reason, warn

Made = TypeVar("Made")


class GivenUp(Exception):
    """The bundled head has failed, here or on another rank."""


def succeed_together(call: Callable[[], Made]) -> Made:
    """Return the result of `call` once it has returned on every rank; raise its error, or that of another rank."""
    if not model_parallel_is_initialized() or (group := get_tp_group()).world_size == 1:
        return call()
    made, error = None, None
    try:
        made = call()
    except Exception as raised:
        error = raised
    lines: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(lines, error and reason(error), group=group.cpu_group)
    if error is not None:
        raise error
    if failed := next((f"on rank {rank}: {line}" for rank, line in enumerate(lines) if line), None):
        raise RuntimeError(failed)
    return cast(Made, made)


def attempt(call: Callable[[], Made], folder: str) -> Made:
    """Return the result of `call` for a bundled head; if it raises on one rank, warn once and raise GivenUp on all."""
    try:
        return succeed_together(call)
    except Exception as error:
        if get_tp_group().rank_in_group == 0:
            warn(folder, error)
            logger.debug("the head's error", exc_info=error)
    raise GivenUp


def release() -> None:
    """Free the memory of a head that was given up."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
