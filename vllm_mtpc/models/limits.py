"""What no model of this package is served with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_mtpc.errors import ServeConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_limits(vllm_config: VllmConfig, model: str) -> None:
    """Raise ServeConfigError for pipeline parallelism and for PTP heads, whose rows are no tokens; `model` names it."""
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise ServeConfigError(
            f"--pipeline-parallel-size {stages} with {model} is not served; allowed: 1; use tensor parallelism"
        )
    if getattr(vllm_config.speculative_config, "method", None) == "ptp":
        raise ServeConfigError(
            f"speculative_config: method 'ptp' with {model} is not served; allowed: 'mtpc'; use an MtPC head"
        )
