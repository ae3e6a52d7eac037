"""vLLM's Model Runner V2, with our speculators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_runner import init_speculator as theirs

from vllm_mtpc.proposers.heads.counts import watch_speculator, with_counts
from vllm_mtpc.proposers.v2 import shipped
from vllm_mtpc.proposers.v2.grammar import StructuredRequests


def speculator_class(spec: Any) -> type:
    """The speculator of one of our configs."""
    return resolve_obj_by_qualname(f"vllm_mtpc.proposers.v2.{spec.speculator()}")


@contextmanager
def our_speculator() -> Iterator[None]:
    """While a runner is made: vLLM's factory knows a closed list of methods, and the runner has no other hook."""

    def init_speculator(vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        spec = vllm_config.speculative_config
        if spec.is_shipped:
            return shipped.made(lambda: speculator_class(spec)(vllm_config, device), vllm_config, device)
        return speculator_class(spec)(vllm_config, device)

    model_runner.init_speculator = init_speculator
    try:
        yield
    finally:
        model_runner.init_speculator = theirs


class RowLoraState(LoraState):
    """Says whose adapter each row with logits takes. vLLM 0.32 says it once per request; with drafts a request has
    1 + K rows: a CPU raises, and a GPU would apply an adapter of lm_head to the wrong rows."""

    rows: Any = None  # [R] rows with logits, of the step's requests

    def make_lora_inputs(self, req_ids: list[str], idx_mapping: Any, num_scheduled_tokens: Any, *args: Any) -> Any:
        adapters, *rest = super().make_lora_inputs(req_ids, idx_mapping, num_scheduled_tokens, *args)
        if self.rows is not None:
            adapters = tuple(self.lora_ids[idx_mapping].repeat(self.rows))
        return (adapters, *rest)


class HeadModelRunner(GPUModelRunner):
    """What is added to the V2 runner of any device."""

    def begin(self) -> None:
        """Called once vLLM has made the runner, before it loads the target."""
        spec = self.speculative_config
        if spec.draft_layers:  # let the target hand out the states that they read
            self.use_aux_hidden_state_outputs = True
        if self.lora_config:
            self.lora_state = RowLoraState(self.max_num_reqs)
        if self.speculator is None or self.is_idle:  # None: not the last pipeline stage
            return
        if spec.mask_drafts:
            self.speculator.structured = StructuredRequests(self.vllm_config, self.req_states)
        watch_speculator(self.speculator)
        if spec.is_shipped:
            shipped.guard(self)

    def ready(self) -> None:
        """Called before the first request."""
        if self.speculator is not None and self.speculative_config.is_shipped:
            shipped.unguard(self)

    @property
    def is_idle(self) -> bool:
        """Whether a head that the target ships has failed, and nothing drafts."""
        return isinstance(self.speculator, shipped.IdleSpeculator)

    def add_requests(self, scheduler_output: Any) -> None:
        """Also notes the requests whose drafts are to be masked with a grammar."""
        super().add_requests(scheduler_output)
        if (structured := getattr(self.speculator, "structured", None)) is not None:
            structured.add(scheduler_output.scheduled_new_reqs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The step's output, with what was cut of its drafts; Ray's executor asks no worker."""
        return with_counts(super().sample_tokens(grammar_output), self.speculator, self.is_idle)

    def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Also notes how many rows with logits each request of the step has."""
        input_batch = super().prepare_inputs(scheduler_output, *args, **kwargs)
        if isinstance(self.lora_state, RowLoraState):
            ends = input_batch.cu_num_logits_np
            self.lora_state.rows = ends[1:] - ends[:-1]
        return input_batch
