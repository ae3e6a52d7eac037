"""Tensor-parallel ranks that agree on the success of a phase before any of them enters its collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from vllm.distributed import get_tp_group, model_parallel_is_initialized

from vllm_mtpc.proposers.config.switches import reason

Made = TypeVar("Made")


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
