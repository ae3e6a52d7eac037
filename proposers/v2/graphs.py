"""CUDA graphs of the draft step: one for each of vLLM's capture sizes and each number of drafts of its batches.

A graph holds what starts at the speculator's buffers. Padding rows have slot -1: nothing is written for them except to
padding rows of these buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorBatchDescriptor

from vllm_mtpc.proposers.heads.load import log_drafts


class DraftGraphs(CudaGraphManager):
    """vLLM's manager, with a descriptor for each number of drafts (PTP: of auxiliary rows) per request.

    Args:
        mode: of the target; drafts are captured where the target's decode steps are.
        drafts_by_batch: drafts of a batch of n requests at index n; 0: none.
        fits: (requests, drafts per request) -> whether the speculator's buffers hold them.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        device: torch.device,
        mode: CUDAGraphMode,
        drafts_by_batch: Sequence[int],
        fits: Callable[[int, int], bool] = lambda num_reqs, num_drafts: True,
    ) -> None:
        is_full = mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if is_full else CUDAGraphMode.NONE
        super().__init__(vllm_config, device, mode, decode_query_len=1)
        descs, below = [], 0
        for desc in reversed(self._capture_descs.pop(CUDAGraphMode.FULL, [])):
            scheduled = set(drafts_by_batch[below + 1 : desc.num_reqs + 1]) - {0}
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
