"""What the tests of draft layers note, and break, inside an engine's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.support import engine


def _noting() -> Callable[[], None]:
    from vllm_mtpc.proposers.v2.layered import LayeredSpeculator

    return noting(LayeredSpeculator)


def noting(owner: type) -> Callable[[], None]:
    """Notes, for every request of every step, where its text ends, the state its head reads and what was drafted."""
    from vllm_mtpc.proposers.v2.verification import DRAFTING

    original = owner.propose

    def propose(self: Any, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = original(self, input_batch, *args, **kwargs)
        for row, name in enumerate([] if kwargs.get("dummy_run") else input_batch.req_ids):
            engine.RECORDED.append(
                {
                    "request": int(name.partition("-")[0]),  # offline, vLLM counts the requests of an engine from 0
                    "prefix": int(self.noise_pos[row]) % DRAFTING,  # which stream its noise is of
                    "hidden": self.hidden_states[row].clone(),
                    "drafts": drafts[row, : kwargs["num_speculative_tokens"]].clone(),  # later columns are stale
                }
            )
        return drafts

    return engine.replaced(owner, "propose", propose)


def _without_adapters() -> Callable[[], None]:
    from vllm_mtpc.proposers.v2.lora import GatedLinear

    return engine.replaced(GatedLinear, "forward", lambda self, x: self.base(x))


def _stale_trunk() -> Callable[[], None]:
    """Rows read the state of the row before them."""
    from vllm_mtpc.proposers.v2.layered import DraftLayers

    original = DraftLayers.forward
    return engine.replaced(
        DraftLayers, "forward", lambda self, positions, states: original(self, positions, states.roll(1, dims=0))
    )


def _unread_chunks() -> Callable[[], None]:
    """Draft layers are left out where a step samples nothing: pieces of a prompt are missing in their cache."""
    from vllm_mtpc.proposers.v2.layered import DraftLayers, LayeredSpeculator

    propose, forward = LayeredSpeculator.propose, DraftLayers.forward
    samples_nothing = [False]

    def noting(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        samples_nothing[0] = not kwargs.get("dummy_run") and not args[5].any()  # num_sampled
        return propose(self, *args, **kwargs)

    def skipping(self: Any, positions: Any, states: torch.Tensor) -> torch.Tensor:
        return states if samples_nothing[0] else forward(self, positions, states)

    undo = [engine.replaced(LayeredSpeculator, "propose", noting), engine.replaced(DraftLayers, "forward", skipping)]
    return lambda: [back() for back in undo] and None


def _with(fault: Callable[[], Callable[[], None]] | None) -> Callable[[], Callable[[], None]]:
    def inject() -> Callable[[], None]:
        undo = [_noting(), *([fault()] if fault else [])]
        return lambda: [back() for back in undo] and None

    return inject


FAULTS = {"without adapters": _without_adapters, "stale trunk": _stale_trunk, "unread chunks": _unread_chunks}
INJECTED = {"layers": _with(None), **{f"layers {name}": _with(fault) for name, fault in FAULTS.items()}}
