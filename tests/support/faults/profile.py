"""How a CPU worker is made to measure memory as vLLM's GPU worker does where --kv-cache-memory-bytes is not given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

from tests.support import engine
from tests.support.speculators import Recorder

CACHE_BYTES = 1 << 26  # that are "left"


def measured_as_on_a_gpu() -> Callable[[], None]:
    """Runs vLLM's profile of a forward pass, and on V2 captures the drafts' graphs in vLLM's minimal KV cache.

    Notes how many graphs were captured, by a stand-in for CUDA's, and the blocks of that cache.
    """
    from vllm.config import set_current_vllm_config
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.cpu_worker import CPUWorker as Owner
    from vllm.v1.worker.gpu import cudagraph_utils

    from vllm_mtpc.proposers.v2.ptp import ptp_speculator as module

    stack, recorder = ExitStack(), Recorder()
    stack.enter_context(recorder.in_place())
    stack.enter_context(mock.patch.object(module, "CAPTURED", ("CPU_ATTN",)))
    for name in ("synchronize", "empty_cache"):
        stack.enter_context(mock.patch.object(torch.accelerator, name, lambda: None))

    def determine_available_memory(self: Any) -> int:
        runner = self.model_runner
        with set_current_vllm_config(self.vllm_config):
            runner.profile_run()
            if self.vllm_config.use_v2_model_runner and runner.speculator is not None:
                compilation = self.vllm_config.compilation_config
                compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [2, 4], 4
                cudagraph_utils._init_minimal_kv_cache_for_profiling(runner)
                blocks = runner.kv_cache_config.num_blocks
                runner.speculator.attn_cg_support = mock.Mock(min_cg_support=AttentionCGSupport.UNIFORM_BATCH)
                has_graphs = getattr(self.vllm_config.speculative_config, "draft_pass", "two-pass") == "two-pass"
                mode = CUDAGraphMode.FULL_DECODE_ONLY if has_graphs else CUDAGraphMode.NONE
                runner.speculator.init_cudagraph_manager(mode)
                runner.speculator.capture()
                runner.speculator.graphs = None
                cudagraph_utils._teardown_profiling_state(runner)
                engine.RECORDED.append((blocks, len(recorder.captured)))
        return CACHE_BYTES

    stack.enter_context(mock.patch.object(Owner, "determine_available_memory", determine_available_memory))
    return stack.close


def first_draft_fails() -> Callable[[], None]:
    """The same, and heads raise when they draft for the first time; notes that they were asked."""
    from vllm_mtpc.proposers.v1 import proposer
    from vllm_mtpc.proposers.v2.speculator import MtpcSpeculator

    def draft(*args: Any, **kwargs: Any) -> Any:
        engine.RECORDED.append("drafted")
        raise RuntimeError("no kernel image is available")

    undo = [
        measured_as_on_a_gpu(),
        engine.replaced(MtpcSpeculator, "_generate_draft", draft),
        engine.replaced(proposer.naive, "draft", draft),
    ]
    return lambda: [back() for back in undo] and None


INJECTED = {"measured_as_on_a_gpu": measured_as_on_a_gpu, "first_draft_fails": first_draft_fails}
