"""Patches for LoRA requests on Model Runner V2: the rows of lm_head that verify drafts, and whose they are.

vLLM 0.32 tells LoRA's lm_head layer one row per request there. With drafts a request has 1 + K rows: a CPU raises, and
a GPU would apply an adapter of lm_head to the wrong rows. V1 counts rows itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_mtpc.proposers.seam.patch import Patch

ROWS = "vllm_mtpc_rows"  # attribute of a runner's LoraState, from the one patch to the other


class PrepareInputs(Patch):
    module = "vllm.v1.worker.gpu.model_runner"
    attribute = "GPUModelRunner.prepare_inputs"
    reason = "note how many rows with logits each request of the step has"
    parameters = ("self", "scheduler_output")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
            input_batch = original(self, *args, **kwargs)
            if self.lora_config and getattr(self.vllm_config.speculative_config, "method", None) == "mtpc":
                ends = input_batch.cu_num_logits_np
                setattr(self.lora_state, ROWS, ends[1:] - ends[:-1])
            return input_batch

        return prepare_inputs


class MakeLoraInputs(Patch):
    module = "vllm.v1.worker.gpu.lora_utils"
    attribute = "LoraState.make_lora_inputs"
    reason = "say which adapter each row with logits belongs to; vLLM says it once per request"
    parameters = ("self", "req_ids", "idx_mapping", "num_scheduled_tokens")

    @classmethod
    def replace(cls, original: Callable[..., Any]) -> Callable[..., Any]:
        def make_lora_inputs(self: Any, req_ids: list[str], idx_mapping: Any, *args: Any, **kwargs: Any) -> Any:
            adapters, *rest = original(self, req_ids, idx_mapping, *args, **kwargs)
            rows = getattr(self, ROWS, None)
            if rows is not None:
                adapters = tuple(self.lora_ids[idx_mapping].repeat(rows))
            return (adapters, *rest)

        return make_lora_inputs


PATCHES: tuple[type[Patch], ...] = (PrepareInputs, MakeLoraInputs)
