"""A head that its target ships, and that fails in a worker before the first request: the target is served without it.

Whatever fails on one tensor-parallel rank is given up on all of them, and said once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar, cast

import torch
from vllm.distributed import get_tp_group

from vllm_mtpc.proposers.config.switches import logger, warn

Made = TypeVar("Made")


class GivenUp(Exception):
    """The head has failed, here or on another rank."""


def attempt(call: Callable[[], Made], folder: str) -> Made:
    """What `call` makes of the head in `folder`. Raises GivenUp on every rank where it raises on one."""
    error, made = None, None
    try:
        made = call()
    except Exception as raised:
        error = raised
    failed = torch.tensor(int(error is not None))
    if (group := get_tp_group()).world_size > 1:
        torch.distributed.all_reduce(failed, group=group.cpu_group)
    if not failed:
        return cast(Made, made)  # what `call` has returned
    if group.rank_in_group == 0:
        warn(folder, error or "it failed on another rank")
        logger.debug("what failed", exc_info=error)
    raise GivenUp from None


def release() -> None:
    """Give back what the head had allocated."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
