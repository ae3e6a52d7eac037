"""Faults of tensor-parallel workers: classes that a worker imports as its `worker_extension_cls`.

vLLM looks the class up by name in every worker process; the lookup puts the fault in force there.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank

from vllm_mtpc.proposers.config import draft_memory
from vllm_mtpc.proposers.v1.proposer import MtpcProposer
from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator


def __getattr__(name: str) -> type:
    if name == "Divides":  # toy vocabularies are divided over the ranks like large ones
        assert draft_memory.is_small(1, 1)
        draft_memory.is_small = lambda *sizes: False
    elif name == "Differs":  # rank 1 drafts another last token
        for owner in (MtpcProposer, MtpcSpeculator):
            owner.propose = _differing(owner.propose)
    else:
        raise AttributeError(name)
    return type(name, (), {})


def _differing(propose: Any) -> Any:
    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(self, *args, **kwargs)
        if get_tensor_model_parallel_rank() == 1:
            if isinstance(drafts, torch.Tensor):
                return 1 - drafts.clamp(max=1)
            return [[*row[:-1], 1 - min(row[-1], 1)] if row else row for row in drafts]
        return drafts

    return faulty
