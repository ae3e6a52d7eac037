"""Checks of an engine's configuration that heads of both methods share; each raises ServeConfigError of one line."""

from __future__ import annotations

import os
from typing import Any

from vllm.platforms import current_platform

from vllm_mtpc.errors import ServeConfigError


def check_adaptive_verification(engine_args: Any) -> None:
    """Raise ServeConfigError where Model Runner V2 has no CUDA graphs; vLLM checks other options."""
    if current_platform.is_cpu() or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0" or engine_args.enforce_eager:
        needs = "vLLM needs Model Runner V2 with full CUDA graphs"
        remedy = "drop it; on Model Runner V1 min_acceptance prunes drafts"
        raise ServeConfigError(f"enable_adaptive_verification: {needs}; {remedy}")


def check_draft_layers(vllm_config: Any) -> None:
    """Raise ServeConfigError for an engine that heads with draft layers or a drafter are not served with."""
    spec, stages = vllm_config.speculative_config, vllm_config.parallel_config.pipeline_parallel_size
    subject, remedy = f"a head with lora_layers={spec.head.lora_layers}", "a head trained with lora_layers 0"
    if spec.head.has_drafter:
        subject, remedy = f"a head of kind {spec.head.head!r}", "a head of another kind"
    if not vllm_config.use_v2_model_runner:
        reason = f"on Model Runner V1: allowed: Model Runner V2; {how_to_v2()}, or use {remedy}"
        raise ServeConfigError(f"{subject} {reason}")
    if stages > 1:
        raise ServeConfigError(f"{subject} and pipeline_parallel_size={stages}: allowed: 1; use tensor_parallel_size")
    # a connector that saves single layers while the target runs would miss the draft layers, which run after it
    transfer, is_layerwise = vllm_config.kv_transfer_config, False
    if transfer is not None and transfer.kv_connector is not None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        connector = KVConnectorFactory.get_connector_class(transfer)
        is_layerwise = connector.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config)
    check_second_pass(f"{subject} and", vllm_config, {"a KV connector that works layer by layer": is_layerwise})


def check_structured_outputs(vllm_config: Any) -> None:
    """Raise ServeConfigError for lm-format-enforcer, whose adapter in vLLM refuses drafts in every request."""
    if vllm_config.structured_outputs_config.backend == "lm-format-enforcer":
        allowed = "allowed: auto, xgrammar, guidance, outlines; drop it"
        raise ServeConfigError(f"structured_outputs_config: backend='lm-format-enforcer' refuses drafts; {allowed}")


def check_second_pass(subject: str, vllm_config: Any, others: dict[str, bool]) -> None:
    """Raise ServeConfigError for options, also `others` (name: is set), that a pass of ours is not served with."""
    parallel = vllm_config.parallel_config
    options = {
        "enable_lora": vllm_config.lora_config is not None,
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "enable_dbo": getattr(parallel, "enable_dbo", False),
        **others,
    }
    for name, is_set in options.items():
        if is_set:
            raise ServeConfigError(f"{subject} {name}: not served together in this version; drop {name}")


def how_to_v2() -> str:
    """Return what to type for Model Runner V2."""
    if current_platform.is_cpu():
        return "without a GPU type scripts/v2_on_cpu.sh vllm serve ... in the checkout of vllm_mtpc"
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return "drop VLLM_USE_V2_MODEL_RUNNER=0"
    return "vLLM's log gives above why it chose V1"
