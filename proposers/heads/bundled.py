"""A head that its target bundles, and that fails in a worker before the first request: the target is served without it.

Whatever fails on one tensor-parallel rank is given up on all of them, and said once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from vllm.distributed import get_tp_group

from vllm_mtpc.proposers.config.switches import logger, warn
from vllm_mtpc.proposers.heads.ranks import succeed_together

Made = TypeVar("Made")


class GivenUp(Exception):
    """The head has failed, here or on another rank."""


def attempt(call: Callable[[], Made], folder: str) -> Made:
    """What `call` makes of the head in `folder`. Raises GivenUp on every rank where it raises on one."""
    try:
        return succeed_together(call)
    except Exception as error:
        if get_tp_group().rank_in_group == 0:
            warn(folder, error)
            logger.debug("what failed", exc_info=error)
    raise GivenUp


def release() -> None:
    """Give back what the head had allocated."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
