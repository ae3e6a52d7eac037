"""The replaced attribute of vLLM's engine core; apart from vllm_patches.py, which imports the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_mtpc.proposers.patches.patch import patch


@patch("vllm.v1.engine.core", "EngineCore.post_step", needs=("self", "model_executed"))
def post_step(original: Callable[..., None], self: Any, model_executed: bool) -> None:
    """Ask a V1 worker of a head for no drafts, which come with its output. Applied in the engine core of a head."""
    if not getattr(self.scheduler, "has_drafts_in_output", False):  # other engines of the process ask
        original(self, model_executed)
