"""The draft step in CUDA graphs: one for each size that vLLM captures and each number of drafts its batches have.

A graph holds what `MtpcSpeculator` does from its buffers on: products of the head, gathers of its ranks, the kernels.
What fills the buffers runs before it. Rows behind a batch's last request have slot -1: nothing is read from the request
states or cached for them, and what is drafted for them goes to rows of `draft_tokens` that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorBatchDescriptor


class DraftGraphs(CudaGraphManager):
    """vLLM's manager, whose descriptors say how many drafts are made; drafts_by_batch[n]: of a batch of n, 0: none."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, mode: CUDAGraphMode, drafts_by_batch: Sequence[int]
    ) -> None:
        is_full = mode.decode_mode() == CUDAGraphMode.FULL
        mode = CUDAGraphMode.FULL_DECODE_ONLY if is_full else CUDAGraphMode.NONE
        super().__init__(vllm_config, device, mode, decode_query_len=1)
        descs, below = [], 0
        for desc in reversed(self._capture_descs.pop(CUDAGraphMode.FULL, [])):
            drafts = set(drafts_by_batch[below + 1 : desc.num_reqs + 1]) - {0}
            descs += [SpeculatorBatchDescriptor(**vars(desc), num_speculative_tokens=count) for count in drafts]
            below = desc.num_reqs
        if descs:  # the largest first, whose memory the others use again
            descs.sort(key=lambda desc: (desc.num_reqs, desc.num_speculative_tokens), reverse=True)
            self._capture_descs[CUDAGraphMode.FULL] = descs

    def capture_drafts(self, draft: Callable[[int, int], None], slots: Tensor) -> None:
        """Captures draft(requests, drafts each); slots [max_num_reqs]: -1 in every row while that goes on."""

        def create_forward_fn(desc: BatchExecutionDescriptor, warmup: bool) -> Callable[[CUDAGraphMode], None]:
            slots.fill_(-1)
            return lambda mode: draft(desc.num_reqs, desc.num_speculative_tokens)

        super().capture(create_forward_fn, "Capturing drafts of the head")

    def find(self, num_reqs: int, num_drafts: int) -> BatchExecutionDescriptor | None:
        """The graph for a batch; None: there is none."""
        desc = self.dispatch(num_reqs, num_reqs, uniform_token_count=1, num_active_loras=0)
        desc = SpeculatorBatchDescriptor(**vars(desc), num_speculative_tokens=num_drafts)
        return desc if desc in self.graphs else None
