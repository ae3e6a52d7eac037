"""What a head is not served with: tables of what an error says, and whether it holds. Nothing has started then."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm.config.model import ModelConfig
from vllm.platforms import current_platform

from vllm_mtpc.config.base import AnyHeadConfig
from vllm_mtpc.errors import ServeConfigError, did_you_mean
from vllm_mtpc.heads import needs_lm_head

Table = dict[str, bool]

REJECTION_METHODS = ("standard", "block", "synthetic")  # vLLM 0.33's "fly" keeps drafts that must be rejected

# Of targets of draft layers. vLLM's class has `model.layers` and `model.norm`, a layer takes (positions, states,
# residual), and the states that enter a layer can be asked for. A test compares the drafts of each with those of a
# model with merged adapters.
ARCHITECTURES = tuple(f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "EvaByte", "TPULlama"))

# vLLM's class of these hands out what stands before its final norm, for the target's own MTP layers, and norms it where
# logits are computed. Heads are trained behind the norm. A test compares this with vLLM's sources.
BEFORE_NORM = (
    *("MiMoForCausalLM", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    *("Step5ForCausalLM", "Step5ForConditionalGeneration", "KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"),
)


def refuse(table: Table) -> None:
    """Raises ServeConfigError with the first text that holds."""
    for text, holds in table.items():
        if holds:
            raise ServeConfigError(text)


def of_request(given: Mapping[str, Any], allowed: tuple[str, ...]) -> Table:
    """What can be said without looking at the head; given, allowed: options of `speculative_config`."""
    unknown = [key for key in given if key not in allowed]
    first, rule = next(iter(unknown), ""), given.get("rejection_sample_method", "standard")
    says = f"speculative_config: rejection_sample_method={rule!r}"
    never_rejects = rule != "standard" and given.get("verify") == "coupled"
    return {
        f"speculative_config: {first!r} is not an option of method {given['method']!r}; allowed: {', '.join(allowed)}; "
        f"remove it{did_you_mean(first, allowed)}": bool(unknown),
        f"{says} does not keep the target's distribution or is not known; allowed: {', '.join(REJECTION_METHODS)}; "
        "drop it": rule not in REJECTION_METHODS,
        f"{says} with verify='coupled', which rejects nothing; allowed: 'standard'; drop one of them": never_rejects,
    }


def of_head(folder: Path, head: AnyHeadConfig, given: Mapping[str, Any], target: ModelConfig) -> Table:
    """A head of the other family or made for another target, a recurrent target, more drafts than the window holds."""
    method, drafts, most = head.speculators_model_type, given.get("num_speculative_tokens"), head.window - 1
    says, asked = f"speculative_config: head {folder}", given["method"]
    copies = getattr(target.hf_config, "hc_mult", 1)
    sizes = (
        ("vocab_size", head.vocab_size, target.get_vocab_size()),
        ("hidden_size", head.hidden_size, target.get_hidden_size()),
    )
    return {
        f'{says} is of method {method!r}, not {asked!r}; type {{"method": "{method}"}}': method != asked,
        **{
            f"{says} has {name}={own}, but target {target.model} has {size}; use a head trained for this target (this "
            f"one was trained for {head.speculators_config.verifier.name_or_path})": own != size
            for name, own, size in sizes
        },
        f"speculative_config: target {target.model} is {target.architecture}, which has recurrent layers: no head is "
        "served on such targets in this version; allowed are targets with attention layers alone; "
        "drop speculative_config": target.is_hybrid or target.is_attention_free,
        f"speculative_config: target {target.model} hands out hidden states of {copies} x {head.hidden_size} numbers, "
        f"the copies of its residual stream; head {folder} reads hidden_size={head.hidden_size}: allowed are targets "
        "that hand out what leaves their final norm; "
        "drop speculative_config": copies > 1 and _hands_out_copies(target),
        f"speculative_config: num_speculative_tokens={drafts}; head {folder} has window={head.window} and its first "
        f"token is the target's own, so allowed are 1 to {most}; "
        "lower it or leave it out": drafts is not None and not (isinstance(drafts, int) and 1 <= drafts <= most),
    }


def of_mtpc_target(spec: Any) -> Table:
    """spec: a MtpcSpeculativeConfig. Its head may need weights of its own, draft layers a target they can be of."""
    head, target, says = spec.head, spec.target_model_config, f"speculative_config: head {spec.model} has"
    ours, is_layered = head.transformer_layer_config.get("num_hidden_layers"), head.lora_layers > 0
    depth = getattr(target.hf_text_config, "num_hidden_layers", None)
    return {
        f"{says} lora_layers={head.lora_layers}, and target {target.model} is {target.architecture}: draft layers are "
        f"served on {', '.join(ARCHITECTURES)}; use a head trained with "
        "lora_layers 0": is_layered and target.architecture not in ARCHITECTURES,
        f"{says} draft layers of a target with {ours} layers, but {target.model} has {depth}; "
        "use a head trained for this target": is_layered and ours not in (None, depth),
        **of_states(spec),
        **(of_backbone_target(spec) if spec.has_backbone else {}),
    }


def of_states(spec: Any) -> Table:
    """A target whose states are not those that a head has learnt to read."""
    architecture = spec.target_model_config.architecture
    return {
        f"speculative_config: target {spec.target_model_config.model} is {architecture}, which hands out hidden states "
        f"from before its final norm; head {spec.model} reads those behind it: allowed are other targets; drop the "
        "head, or serve the target's own MTP layers: "
        '{"method": "mtp", "num_speculative_tokens": 1}': architecture in BEFORE_NORM
    }


def of_backbone_target(spec: Any) -> Table:
    head, target, ranks = spec.head, spec.target_model_config, spec.target_parallel_config.tensor_parallel_size
    depth, last = target.get_total_num_hidden_layers(), max(spec.aux_layers)
    kinds = {
        "keeps compressed keys and values (MLA)": target.use_mla,
        "has several positions per token": target.uses_mrope,
        "does not hand out the states of its layers (vLLM: SupportsEagle3)": not _hands_out_layers(target),
    }
    parts = {name: getattr(head, name) for name in ("backbone_heads", "backbone_kv_heads", "backbone_width")}
    uneven = [f"{name}={size}" for name, size in parts.items() if size % ranks and not _repeats(name, size, ranks)]
    says = f"speculative_config: head {spec.model} has a backbone"
    return {
        f"{says}, and target {target.model} {what}: not served together in this version; "
        "use a head of another kind": holds
        for what, holds in kinds.items()
    } | {
        f"{says} that reads layer {last}, but target {target.model} has {depth}; "
        "use a head trained for this target": last > depth,
        f"{says}, whose layers share the target's KV cache: allowed head_dtype: auto; given: {spec.head_dtype}; "
        "remove head_dtype": spec.head_dtype != "auto",
        f"{says} with {', '.join(uneven)}, which tensor_parallel_size={ranks} does not divide; "
        "lower tensor_parallel_size": bool(uneven),
    }


def _repeats(name: str, size: int, ranks: int) -> bool:
    """Whether ranks have the same key and value heads."""
    return name == "backbone_kv_heads" and ranks % size == 0


def of_ptp_target(spec: Any) -> Table:
    target, stages = spec.target_model_config, spec.target_parallel_config.pipeline_parallel_size
    kinds, says = getattr(target.hf_text_config, "layer_types", None) or (), f"method 'ptp' on {target.model},"
    is_other = any(kind != "full_attention" for kind in kinds) or bool(target.get_sliding_window())
    is_other = is_other or target.use_mla
    return {
        f"speculative_config: method 'ptp' with pipeline_parallel_size={stages}: drafts come from the whole target, "
        "which no stage holds; allowed: 1; use tensor_parallel_size": stages > 1,
        f"speculative_config: {says} whose layers do not all have full attention with a key and a value per head: "
        "allowed are such targets alone; use an MtPC head": is_other,
        f"speculative_config: {says} which has several positions per token: allowed are targets with one; "
        "use an MtPC head": target.uses_mrope,
        **(of_states(spec) if spec.head.late_width else {}),
    }


def of_adaptive_verification(engine_args: Any) -> Table:
    """Where vLLM's own does not run, before vLLM says so in other words."""
    mode = getattr(engine_args.compilation_config, "cudagraph_mode", None)
    lacking = {
        "a CPU": current_platform.is_cpu(),
        "VLLM_USE_V2_MODEL_RUNNER=0": os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0",
        "enforce_eager": engine_args.enforce_eager,
        "CUDA graphs without full ones": mode is not None and not mode.has_full_cudagraphs(),
        "enable_lora": engine_args.enable_lora,
        "pipeline_parallel_size above 1": engine_args.pipeline_parallel_size > 1,
    }
    return {
        f"enable_adaptive_verification with {what}: vLLM needs Model Runner V2 on a GPU with full CUDA graphs, no LoRA "
        "and one pipeline stage; drop either; on Model Runner V1 min_survival cuts drafts": holds
        for what, holds in lacking.items()
    }


def of_mtpc_engine(spec: Any, vllm_config: Any) -> Table:
    """spec: a MtpcSpeculativeConfig."""
    is_v2, head, rule = vllm_config.use_v2_model_runner, spec.head, spec.rejection_sample_method
    stages, remedy = vllm_config.parallel_config.pipeline_parallel_size, "drop --no-async-scheduling"
    is_served, runner = is_v2 and vllm_config.scheduler_config.async_scheduling, "V2 with synchronous scheduling"
    if not is_v2:
        runner, remedy = "V1", how_to_v2()
    return {
        f"pipeline_parallel_size={stages} with drafts on Model Runner {runner}: vLLM crashes there; allowed: Model "
        f"Runner V2 with asynchronous scheduling; {remedy}, "
        "or use tensor parallelism": stages > 1 and not is_served,
        **of_structured_outputs(vllm_config),
        **(of_draft_layers(vllm_config) if spec.aux_layers else {}),
        f"enable_lora with a head of kind {head.head!r}: it reads the target's lm_head, whose LoRA layer takes one row "
        "per request; allowed: heads of kind 'linear', 'mlp', 'transformer'; drop enable_lora or the "
        "head": vllm_config.lora_config is not None and needs_lm_head(head.head),
        f"min_survival={spec.min_survival} on Model Runner V2: the host does not see drafts there; allowed: 0; drop "
        "it, or type enable_adaptive_verification: true": is_v2 and bool(spec.min_survival),
        "verify='coupled' on Model Runner V1, where requests without a seed have no noise that can be drawn again; "
        f"allowed: 'rejection'; drop it, or {remedy}": not is_v2 and spec.verify == "coupled",
        "rejection_sample_method 'block' on Model Runner V1, which verifies token by token: allowed are 'standard' and "
        "'synthetic'; drop it": not is_v2 and rule == "block",
        "rejection_sample_method 'synthetic' on Model Runner V1 on a CPU: vLLM's kernels there do not have it; "
        "allowed: 'standard'; drop it, "
        "or use a GPU": not is_v2 and rule == "synthetic" and current_platform.is_cpu(),
    }


def of_draft_layers(vllm_config: Any) -> Table:
    spec = vllm_config.speculative_config
    says, remedy = f"a head with lora_layers={spec.head.lora_layers}", "a head trained with lora_layers 0"
    if spec.has_backbone:
        says, remedy = "a head of kind 'backbone'", "a head of another kind"
    stages, is_v1 = vllm_config.parallel_config.pipeline_parallel_size, not vllm_config.use_v2_model_runner
    return {
        f"{says} on Model Runner V1, which keeps no KV cache for draft layers: allowed: Model Runner V2; "
        f"{how_to_v2()}, or use {remedy}": is_v1,
        f"{says} and pipeline_parallel_size={stages}: draft layers are not divided into stages; allowed: 1; "
        "use tensor_parallel_size": stages > 1,
        **_not_together(
            f"{says} and",
            vllm_config,
            {"a KV connector that works layer by layer": _is_layerwise(vllm_config.kv_transfer_config)},
        ),
    }


def of_structured_outputs(vllm_config: Any) -> Table:
    is_refused = (backend := vllm_config.structured_outputs_config.backend) == "lm-format-enforcer"
    return {
        f"structured_outputs_config: backend={backend!r} with drafts, which vLLM's adapter of it refuses in every "
        "request; allowed: auto, xgrammar, guidance, outlines; drop it": is_refused
    }


def of_ptp_engine(vllm_config: Any) -> Table:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    others = {
        "kv_transfer_config": vllm_config.kv_transfer_config is not None,
        "watermark_config": getattr(vllm_config, "watermark_config", None) is not None,
        # engines step together there, and the student's pass is no part of that
        "data_parallel_size on a mixture of experts": parallel.data_parallel_size > 1 and model.is_moe,
        "max_model_len 'auto'": model.original_max_model_len == -1,  # fitted to blocks of which some are set aside
    }
    return {
        **of_structured_outputs(vllm_config),
        "method 'ptp' on Model Runner V1: it drafts from token lists on the host, PTP from the target's own rows; "
        f"allowed: Model Runner V2; {how_to_v2()}, or use an MtPC head": not vllm_config.use_v2_model_runner,
        **_not_together("method 'ptp' with", vllm_config, others),
    }


def how_to_v2() -> str:
    """What to type for Model Runner V2, as an error says it; a variable is to be dropped only where it is set."""
    if current_platform.is_cpu():
        return "without a GPU type scripts/v2_on_cpu.sh vllm serve ... in the checkout of vllm_mtpc"
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return "drop VLLM_USE_V2_MODEL_RUNNER=0"
    return "vLLM's log says above why it chose V1"


def _not_together(says: str, vllm_config: Any, others: Table) -> Table:
    """Options, by name and whether they are set, that no pass of ours next to the target's is served with."""
    parallel = vllm_config.parallel_config
    options = {
        "enable_lora": vllm_config.lora_config is not None,
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "enable_dbo": getattr(parallel, "enable_dbo", False),
        **others,
    }
    return {f"{says} {name}: not served together in this version; drop {name}": on for name, on in options.items()}


def _hands_out_copies(target: ModelConfig) -> bool:
    from vllm.model_executor.model_loader.utils import get_model_cls

    return hasattr(get_model_cls(target), "get_mtp_target_hidden_states")  # as vLLM's speculators find out


def _hands_out_layers(target: ModelConfig) -> bool:
    from vllm.model_executor.model_loader.utils import get_model_cls

    return hasattr(get_model_cls(target), "set_aux_hidden_state_layers")


def _is_layerwise(kv_transfer_config: Any) -> bool:
    """Whether a KV connector waits for and saves single layers while the target runs; draft layers run after it."""
    if kv_transfer_config is None or kv_transfer_config.kv_connector is None:
        return False
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    connector = KVConnectorFactory.get_connector_class(kv_transfer_config)
    return connector.requires_piecewise_for_cudagraph(kv_transfer_config.kv_connector_extra_config)
