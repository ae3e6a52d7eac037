"""Rank 1 drafts another last token: a fault for workers that import this as their `worker_extension_cls`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank

from vllm_mtpc.proposers.v1.proposer import MtpcProposer
from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator


class Differs:
    """Nothing is added to the worker; the drafts change because its module was imported."""


def _inject(owner: type, name: str) -> None:
    propose = getattr(owner, name)

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(self, *args, **kwargs)
        if get_tensor_model_parallel_rank() == 1:
            if isinstance(drafts, torch.Tensor):
                return 1 - drafts.clamp(max=1)
            return [[*row[:-1], 1 - min(row[-1], 1)] if row else row for row in drafts]
        return drafts

    setattr(owner, name, faulty)


_inject(MtpcProposer, "propose")
_inject(MtpcSpeculator, "propose")
