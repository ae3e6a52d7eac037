"""Which model runner vLLM has chosen, and what to type for the other one."""

from __future__ import annotations

import os


def how_to_v2() -> str:
    """What to type for Model Runner V2, as an error says it; a variable is to be dropped only where it is set."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return "without a GPU type scripts/v2_on_cpu.sh vllm serve ... in the checkout of vllm_mtpc"
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return "drop VLLM_USE_V2_MODEL_RUNNER=0"
    return "vLLM's log says above why it chose V1"
