"""What heads with LoRA draft layers are served on: refusals of everything else, in the caller's process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.config.model import ModelConfig

from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.proposers.config.runner import how_to_v2

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
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "enable_dbo": getattr(parallel, "enable_dbo", False),
        "a KV connector that works layer by layer": _is_layerwise(vllm_config.kv_transfer_config),
    }
    for option, is_set in refused.items():
        if is_set:
            raise ServeConfigError(
                f"a head with lora_layers={count} and {option}: not served together in this version; drop {option}"
            )


def _is_layerwise(kv_transfer_config: Any) -> bool:
    """Whether a KV connector waits for and saves single layers while the target runs; draft layers run after it."""
    if kv_transfer_config is None or kv_transfer_config.kv_connector is None:
        return False
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    connector = KVConnectorFactory.get_connector_class(kv_transfer_config)
    return connector.requires_piecewise_for_cudagraph(kv_transfer_config.kv_connector_extra_config)
