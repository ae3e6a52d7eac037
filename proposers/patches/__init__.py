"""The vLLM integration: patches (`vllm_patches.py`) and subclasses of vLLM's classes (`scheduler.py`, `worker.py`)."""

from __future__ import annotations


def install() -> None:
    """Apply the patches of every process; each takes effect when vLLM imports its module."""
    from vllm_mtpc.proposers.patches import patch, vllm_patches

    patch.apply(*vllm_patches.EVERY_PROCESS)
