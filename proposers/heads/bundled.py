"""Bundled heads that fail before the first request: all tensor-parallel ranks serve the target without the head."""

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
    """Return the result of `call`; if it raises on one rank, warn once and raise GivenUp on all ranks."""
    try:
        return succeed_together(call)
    except Exception as error:
        if get_tp_group().rank_in_group == 0:
            warn(folder, error)
            logger.debug("the head's error", exc_info=error)
    raise GivenUp


def release() -> None:
    """Free the device memory of the head."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
