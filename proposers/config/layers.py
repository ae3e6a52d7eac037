"""What heads with LoRA draft layers are served on: everything else is refused, in the caller's process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.config.model import ModelConfig
from vllm.platforms import current_platform

from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import ServeConfigError

# vLLM's class has `model.layers` and `model.norm`, a layer takes (positions, states, residual), and the states that
# enter a layer can be asked for. A test compares the drafts of each with those of a model with merged adapters.
ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "EvaByteForCausalLM",
    "TPULlamaForCausalLM",
)


def how_to_v2() -> str:
    """What to type for Model Runner V2, as an error says it; a variable is to be dropped only where it is set."""
    if current_platform.is_cpu():
        return "without a GPU type scripts/v2_on_cpu.sh vllm serve ... in the checkout of vllm_mtpc"
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return "drop VLLM_USE_V2_MODEL_RUNNER=0"
    return "vLLM's log says above why it chose V1"


def check_target(folder: Path, head: HeadConfig, target: ModelConfig) -> None:
    """Refuse a target whose layers cannot be draft layers."""
    if target.architecture not in ARCHITECTURES:
        raise ServeConfigError(
            f"speculative_config: head {folder} has lora_layers={head.lora_layers}, and target {target.model} is "
            f"{target.architecture}: draft layers are served on {', '.join(ARCHITECTURES)}; use a head trained with "
            "lora_layers 0"
        )
    depth = target.hf_text_config.num_hidden_layers
    if (ours := head.transformer_layer_config.get("num_hidden_layers")) not in (None, depth):
        raise ServeConfigError(
            f"speculative_config: head {folder} has draft layers of a target with {ours} layers, but {target.model} "
            f"has {depth}; use a head trained for this target"
        )


def check_engine(vllm_config: Any) -> None:
    """Refuse what draft layers are not served with, once the engine's configuration is known."""
    count, parallel = vllm_config.speculative_config.head.lora_layers, vllm_config.parallel_config
    if not vllm_config.use_v2_model_runner:
        raise ServeConfigError(
            f"a head with lora_layers={count} on Model Runner V1, which keeps no KV cache for draft layers: allowed: "
            f"Model Runner V2; {how_to_v2()}, or use a head trained with lora_layers 0"
        )
    if parallel.pipeline_parallel_size > 1:
        raise ServeConfigError(
            f"a head with lora_layers={count} and pipeline_parallel_size={parallel.pipeline_parallel_size}: draft "
            "layers are not divided into stages; allowed: 1; use tensor_parallel_size"
        )
    refused = {
        "enable_lora": vllm_config.lora_config is not None,
        **context_parallel(parallel),
        "a KV connector that works layer by layer": _is_layerwise(vllm_config.kv_transfer_config),
    }
    refuse(refused, f"a head with lora_layers={count} and")


def context_parallel(parallel: Any) -> dict[str, bool]:
    """Options by name, and whether they are set, under which no pass of ours may follow the target's."""
    return {
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "enable_dbo": getattr(parallel, "enable_dbo", False),
    }


def refuse(options: dict[str, bool], what: str) -> None:
    """Raises ServeConfigError for the first of these options that is set together with `what`."""
    for option, is_set in options.items():
        if is_set:
            raise ServeConfigError(f"{what} {option}: not served together in this version; drop {option}")


def _is_layerwise(kv_transfer_config: Any) -> bool:
    """Whether a KV connector waits for and saves single layers while the target runs; draft layers run after it."""
    if kv_transfer_config is None or kv_transfer_config.kv_connector is None:
        return False
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    connector = KVConnectorFactory.get_connector_class(kv_transfer_config)
    return connector.requires_piecewise_for_cudagraph(kv_transfer_config.kv_connector_extra_config)
