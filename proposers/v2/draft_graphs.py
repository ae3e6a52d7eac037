"""CUDA graphs of drafts, for each batch size and number of drafts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorBatchDescriptor

from vllm_mtpc.proposers.worker.load import log_drafts


def replace_attributes(config: Any, **attributes: Any) -> Any:
    """Copy one of vLLM's configs with other attributes, without its validation."""
    twin = copy.copy(config)
    for name, value in attributes.items():
        object.__setattr__(twin, name, value)  # the configs validate assignments against each other
    return twin


class DraftGraphs(CudaGraphManager):
    """CUDA graphs of the draft step, one for each capture size and each number of drafts of its batches.

    Capture sizes are vLLM's and the largest batch, so every batch is drafted by a graph.

    A graph holds what starts at the speculator's buffers. Padding rows have slot -1: nothing is written for them except
    to padding rows of these buffers.

    Args:
        mode: drafts are captured where it captures decode steps whole.
        drafts_by_batch: drafts (PTP: auxiliary rows per request) of a batch of n requests at index n; 0: none.
        fits: (requests, drafts per request) -> whether the speculator's buffers hold them.
        arms: numbers of drafts of every batch that has more (`OnlinePlan`).
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        mode: CUDAGraphMode,
        drafts_by_batch: Sequence[int],
        fits: Callable[[int, int], bool] = lambda num_reqs, num_drafts: True,
        arms: Sequence[int] = (),
    ) -> None:
        is_full = mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if is_full else CUDAGraphMode.NONE
        compilation, largest = vllm_config.compilation_config, vllm_config.scheduler_config.max_num_seqs
        if sizes := compilation.cudagraph_capture_sizes:
            sizes = sorted({*(size for size in sizes if size < largest), largest})
            compilation = replace_attributes(
                compilation, cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=largest
            )
        config = replace_attributes(vllm_config, compilation_config=compilation)
        super().__init__(config, device, mode, decode_query_len=1)
        descs, below = [], 0
        for desc in reversed(self._capture_descs.pop(CUDAGraphMode.FULL, [])):
            scheduled = set(drafts_by_batch[below + 1 : desc.num_reqs + 1]) - {0}
            scheduled |= {count for count in arms if 0 < count < max(scheduled, default=0)}
            drafts = [count for count in scheduled if fits(desc.num_reqs, count)]
            descs += [SpeculatorBatchDescriptor(**vars(desc), num_speculative_tokens=count) for count in drafts]
            below = desc.num_reqs
        if descs:  # the largest first: the others reuse its memory
            descs.sort(key=lambda desc: (desc.num_reqs, desc.num_speculative_tokens), reverse=True)
            self._capture_descs[CUDAGraphMode.FULL] = descs
        log_drafts(vllm_config, str(len(descs) or "NONE"))

    def capture_drafts(self, prepare: Callable[[int, int], Callable[[], None]]) -> None:
        """Capture the calls that prepare(requests, drafts per request) returns for batches of padding."""

        def create_forward_fn(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            draft = prepare(desc.num_reqs, desc.num_speculative_tokens)
            return lambda mode: draft()

        super().capture(create_forward_fn, "Capturing drafts of the head")

    def find(self, num_reqs: int, num_drafts: int) -> BatchExecutionDescriptor | None:
        desc = self.dispatch(num_reqs, num_reqs, uniform_token_count=1, num_active_loras=0)
        desc = SpeculatorBatchDescriptor(**vars(desc), num_speculative_tokens=num_drafts)
        return desc if desc in self.graphs else None
