"""vLLM's Model Runner V2, with our speculators.

The head that a target bundles is guarded before the first request: in its construction, loading, passes of vLLM's
memory profile and warm-up, and graphs. Where it fails, nothing drafts. The first step's output tells the scheduler
(patches/scheduler.py), which plans no drafts from then on; with asynchronous scheduling it has planned one more step by
then, whose drafts are zeros that are verified like any others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_runner import init_speculator as theirs
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_mtpc.proposers.heads import bundled
from vllm_mtpc.proposers.heads.counts import watch_speculator, with_counts
from vllm_mtpc.proposers.v2.grammar import StructuredRequests

GUARDED = ("load_model", "propose", "init_cudagraph_manager", "capture")


class IdleSpeculator(BaseSpeculator):
    """Drafts nothing, in no memory to speak of."""

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
        """Zeros, for the one step that the scheduler does not know yet."""
        return self.draft_tokens[: input_batch.num_reqs].zero_()


def made(build: Callable[[], BaseSpeculator], vllm_config: VllmConfig, device: torch.device) -> BaseSpeculator:
    """What `build` makes, or an idle speculator where it fails."""
    try:
        return bundled.attempt(build, vllm_config.speculative_config.model_folder)
    except bundled.GivenUp:
        return IdleSpeculator(vllm_config, device)


def guard(runner: Any) -> None:
    """Until `unguard`, a speculator that fails is replaced by an idle one."""
    config, speculator = runner.vllm_config, runner.speculator

    def guarded(name: str) -> Callable[..., Any]:
        call = getattr(speculator, name)

        def attempted(*args: Any, **kwargs: Any) -> Any:
            # what a head may take hold of while it is loaded: the target's model, vLLM's table of layers
            holders = [vars(args[0]), config.compilation_config.static_forward_context] if name == "load_model" else []
            before = [dict(holder) for holder in holders]
            try:
                return bundled.attempt(partial(call, *args, **kwargs), config.speculative_config.model_folder)
            except bundled.GivenUp:
                for holder, given in zip(holders, before, strict=True):
                    holder.clear()
                    holder.update(given)
                vars(speculator).clear()
                runner.speculator = IdleSpeculator(config, runner.device)
                bundled.release()
                return getattr(runner.speculator, name)(*args, **kwargs)

        return attempted

    runner.unguarded = {name: own for name, own in vars(speculator).items() if name in GUARDED}
    vars(speculator).update({name: guarded(name) for name in GUARDED})


def unguard(runner: Any) -> None:
    """From here on errors are errors."""
    if not isinstance(runner.speculator, IdleSpeculator):
        for name in GUARDED:
            delattr(runner.speculator, name)
        vars(runner.speculator).update(runner.unguarded)


def speculator_class(spec: Any) -> type:
    """The speculator of one of our configs."""
    return resolve_obj_by_qualname(f"vllm_mtpc.proposers.v2.{spec.speculator()}")


@contextmanager
def our_speculator() -> Iterator[None]:
    """While a runner is made: vLLM's factory knows a closed list of methods, and the runner has no other hook."""

    def init_speculator(vllm_config: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        spec = vllm_config.speculative_config

        def build() -> BaseSpeculator:
            return speculator_class(spec)(vllm_config, device)

        return made(build, vllm_config, device) if spec.is_bundled else build()

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
        if spec.aux_layers:  # let the target hand out the states that draft layers read
            self.use_aux_hidden_state_outputs = True
        if self.lora_config:
            self.lora_state = RowLoraState(self.max_num_reqs)
        if self.speculator is None or isinstance(self.speculator, IdleSpeculator):  # None: not the last pipeline stage
            return
        if spec.mask_drafts:
            self.speculator.structured = StructuredRequests(self.vllm_config, self.req_states)
        watch_speculator(self.speculator)
        if spec.is_bundled:
            guard(self)

    def ready(self) -> None:
        """Called before the first request."""
        if self.speculator is not None and self.speculative_config.is_bundled:
            unguard(self)

    def add_requests(self, scheduler_output: Any) -> None:
        """Also notes the requests whose drafts are to be masked with a grammar."""
        super().add_requests(scheduler_output)
        if (structured := getattr(self.speculator, "structured", None)) is not None:
            structured.add(scheduler_output.scheduled_new_reqs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The step's output, with what was cut of its drafts; Ray's executor asks no worker."""
        return with_counts(super().sample_tokens(grammar_output), self.speculator)

    def prepare_inputs(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Also notes how many rows with logits each request of the step has."""
        input_batch = super().prepare_inputs(scheduler_output, *args, **kwargs)
        if isinstance(self.lora_state, RowLoraState):
            ends = input_batch.cu_num_logits_np
            self.lora_state.rows = ends[1:] - ends[:-1]
        return input_batch
