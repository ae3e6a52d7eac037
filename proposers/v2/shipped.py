"""The V2 speculator of a head that its target ships: one that fails before the first request drafts nothing.

Guarded are its construction, loading, passes of vLLM's memory profile and warm-up, and graphs. The first step's output
tells the scheduler (seam/scheduler.py), which plans no drafts from then on; with asynchronous scheduling it has planned
one more step by then, whose drafts are zeros that are verified like any others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_mtpc.proposers.heads import shipped

GUARDED = ("load_model", "propose", "init_cudagraph_manager", "capture")


class IdleSpeculator(BaseSpeculator):
    """Drafts nothing, in no memory to speak of."""

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
        return shipped.attempt(build, vllm_config.speculative_config.model_folder)
    except shipped.GivenUp:
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
                return shipped.attempt(lambda: call(*args, **kwargs), config.speculative_config.model_folder)
            except shipped.GivenUp:
                for holder, given in zip(holders, before, strict=True):
                    holder.clear()
                    holder.update(given)
                vars(speculator).clear()
                runner.speculator = IdleSpeculator(config, runner.device)
                shipped.release()
                return getattr(runner.speculator, name)(*args, **kwargs)

        return attempted

    runner.unguarded = {name: vars(speculator).get(name) for name in GUARDED}
    for name in GUARDED:
        setattr(speculator, name, guarded(name))


def unguard(runner: Any) -> None:
    """From here on errors are errors."""
    if isinstance(runner.speculator, IdleSpeculator):
        return
    for name, own in runner.unguarded.items():
        if own is None:
            delattr(runner.speculator, name)
        else:
            setattr(runner.speculator, name, own)
