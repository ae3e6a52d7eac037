"""vLLM's Model Runner V2 with our speculators.

A bundled head that fails before the first request (in its construction, loading, the memory profile, the warm-up or
its CUDA graphs) is replaced by an `IdleSpeculator`. The first step's output reports it to the scheduler
(`patches/scheduler.py`), which plans no more drafts; one step may be planned by then, whose drafts are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_mtpc.proposers.heads import ranks
from vllm_mtpc.proposers.heads.counts import attach_counts
from vllm_mtpc.proposers.heads.grammar_masks import StructuredRequests

GUARDED = ("load_model", "propose", "init_cudagraph_manager", "capture")


class IdleSpeculator(BaseSpeculator):
    """The speculator after a bundled head has failed."""

    is_idle = True
    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        shape = (vllm_config.scheduler_config.max_num_seqs, vllm_config.speculative_config.num_speculative_tokens)
        self.draft_tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self.draft_token_confidence_probs = torch.zeros(shape, device=device)

    def load_model(self, target_model: Any) -> None: ...

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None: ...

    def capture(self) -> None: ...

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return zeros [R, K] for the step that the scheduler planned before it was informed."""
        return self.draft_tokens[: input_batch.num_reqs].zero_()


def guard(runner: Any) -> None:
    """Replace the speculator by an idle one if it fails before `unguard`."""
    config, speculator = runner.vllm_config, runner.speculator

    def guarded(name: str) -> Callable[..., Any]:
        call = getattr(speculator, name)

        def attempted(*args: Any, **kwargs: Any) -> Any:
            # loading may change the target's model and vLLM's table of layers
            holders = [vars(args[0]), config.compilation_config.static_forward_context] if name == "load_model" else []
            before = [dict(holder) for holder in holders]
            try:
                return ranks.attempt(partial(call, *args, **kwargs), config.speculative_config.model_folder)
            except ranks.GivenUp:
                for holder, given in zip(holders, before, strict=True):
                    holder.clear()
                    holder.update(given)
                vars(speculator).clear()
                runner.speculator = IdleSpeculator(config, runner.device)
                ranks.release()
                return getattr(runner.speculator, name)(*args, **kwargs)

        return attempted

    vars(speculator).update({name: guarded(name) for name in GUARDED})


def unguard(runner: Any) -> None:
    """Let further errors of the speculator reach vLLM."""
    if not isinstance(runner.speculator, IdleSpeculator):
        for name in GUARDED:
            delattr(runner.speculator, name)


def speculator_class(spec: Any) -> type:
    """Return the class that `spec.speculator()` names."""
    return resolve_obj_by_qualname(f"vllm_mtpc.proposers.v2.{spec.speculator()}")


def build_speculator(vllm_config: VllmConfig, device: torch.device) -> BaseSpeculator:
    """Return the speculator of a configuration; for a bundled head that fails an idle one."""
    spec = vllm_config.speculative_config
    build = partial(speculator_class(spec), vllm_config, device)
    if not spec.is_bundled:
        return build()
    try:
        return ranks.attempt(build, spec.model_folder)
    except ranks.GivenUp:
        return IdleSpeculator(vllm_config, device)


class RowLoraState(LoraState):
    """Names the adapter of each row with logits; vLLM 0.32 names one per request, whose drafts have rows too."""

    rows: Any = None  # [R], rows with logits of each request

    def make_lora_inputs(self, req_ids: list[str], idx_mapping: Any, num_scheduled_tokens: Any, *args: Any) -> Any:
        adapters, *rest = super().make_lora_inputs(req_ids, idx_mapping, num_scheduled_tokens, *args)
        if self.rows is not None:
            adapters = tuple(self.lora_ids[idx_mapping].repeat(self.rows))
        return (adapters, *rest)


class HeadModelRunner(GPUModelRunner):
    """Additions to the V2 runner of any device."""

    def begin(self) -> None:
        spec = self.speculative_config
        if spec.aux_layers:  # the target returns the states that draft layers read
            self.use_aux_hidden_state_outputs = True
        if self.lora_config:
            self.lora_state = RowLoraState(self.max_num_reqs)
        if self.speculator is None or isinstance(self.speculator, IdleSpeculator):  # None: not the last pipeline stage
            return
        if spec.mask_drafts:
            self.speculator.structured = StructuredRequests(self.vllm_config, self.req_states)
        if spec.is_bundled:
            guard(self)

    def ready(self) -> None:
        if self.speculator is not None and self.speculative_config.is_bundled:
            unguard(self)

    def add_requests(self, scheduler_output: Any) -> None:
        super().add_requests(scheduler_output)
        if (structured := getattr(self.speculator, "structured", None)) is not None:
            structured.add(scheduler_output.scheduled_new_reqs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        return attach_counts(super().sample_tokens(grammar_output), self.speculator)

    def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        input_batch = super().prepare_inputs(scheduler_output, *args, **kwargs)
        if isinstance(self.lora_state, RowLoraState):
            ends = input_batch.cu_num_logits_np
            self.lora_state.rows = ends[1:] - ends[:-1]
        return input_batch
