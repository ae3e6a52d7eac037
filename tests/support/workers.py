"""Faults of tensor-parallel workers: classes that a worker imports as its `worker_extension_cls`.

vLLM looks the class up by name in every worker process; the lookup puts the fault in force there.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank

from tests.support.recorders import wrapping
from vllm_mtpc.proposers.config import draft_memory
from vllm_mtpc.proposers.v1.proposer import MtpcProposer
from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator


def __getattr__(name: str) -> type:
    if name == "Divides":  # toy vocabularies are divided over the ranks like large ones
        assert draft_memory.is_small(1, 1)
        draft_memory.is_small = lambda *sizes: False
    elif name == "Differs":  # rank 1 drafts other tokens
        MtpcProposer._generate_drafts = _differing_v1(MtpcProposer._generate_drafts)
        MtpcSpeculator.propose = _differing_v2(MtpcSpeculator.propose)
    else:
        raise AttributeError(name)
    return type(name, (), {})


@wrapping
def _differing_v1(original: Any, self: Any, *args: Any) -> Any:
    drafts, ends = original(self, *args)
    return [[1 - min(token, 1) for token in row] for row in drafts] if _is_second() else drafts, ends


@wrapping
def _differing_v2(original: Any, self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    drafts = original(self, *args, **kwargs)
    return 1 - drafts.clamp(max=1) if _is_second() else drafts


def _is_second() -> bool:
    return get_tensor_model_parallel_rank() == 1
