"""What a head is not served with: tables of rows, checked before a worker starts.

Rows are evaluated in order, up to the first that applies, so a row may rely on those before it. vLLM and pydantic
refuse what they validate themselves.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from vllm.config.model import ModelConfig
from vllm.platforms import current_platform

from vllm_mtpc.errors import ServeConfigError
from vllm_mtpc.heads.leaves import LEAVES
from vllm_mtpc.heads.trunk import TRUNKS
from vllm_mtpc.proposers.options.versions import vllm_version

Row = tuple[object, str, str, str]  # whether it is so, what is wrong, what is allowed, what to type
Rows = Iterator[Row]
# Targets of LoRA draft layers: `model.layers` of (positions, states, residual), `model.norm`, auxiliary hidden states
DRAFT_LAYER_TARGETS = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"),
    *("Qwen3ForCausalLM", "EvaByteForCausalLM", "TPULlamaForCausalLM"),
)
# vLLM's classes of these targets return the states before the final norm; a test compares the list with its sources
BEFORE_NORM = (
    *("MiMoForCausalLM", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"),
    *("Step5ForCausalLM", "Step5ForConditionalGeneration", "KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"),
)


def refuse(rows: Rows, subject: str = "") -> None:
    """Raise ServeConfigError for the first row whose condition holds."""
    for is_so, wrong, allowed, remedy in rows:
        if is_so:
            raise ServeConfigError(f"{subject}{wrong}: allowed: {allowed}; {remedy}")


def head_rows(name: str, head: Any, method: str, drafts: Any, target: ModelConfig) -> Rows:
    """Yield the rows of every head for the user's `method` and number of drafts (None: not given)."""
    own, place, most, other = head.speculators_model_type, target.model, head.window - 1, "drop speculative_config"
    yield own != method, f"head {name} is of method {own!r}, not {method!r}", own, f'type {{"method": "{own}"}}'
    trained = f"heads of this target, and this one was trained for {head.speculators_config.verifier.name_or_path}"
    for size, wanted in (("vocab_size", target.get_vocab_size()), ("hidden_size", target.get_hidden_size())):
        has = getattr(head, size)
        yield has != wanted, f"head {name} has {size}={has}, target {place} has {wanted}", trained, "name another"
    is_recurrent = target.is_hybrid or target.is_attention_free
    reason = f"drafts change their text in vLLM {vllm_version()}"
    wrong = f"target {place} is {target.architecture}, which has recurrent layers ({reason})"
    yield is_recurrent, wrong, "attention layers alone", other
    is_wide = getattr(target.hf_config, "hc_mult", 1) > 1  # as vLLM's speculators find out
    is_wide = is_wide and _target_class_has(target, "get_mtp_target_hidden_states")
    yield is_wide, f"target {place} returns several hidden states per token", "one", other
    fits = drafts is None or (isinstance(drafts, int) and 1 <= drafts <= most)
    wrong = f"num_speculative_tokens={drafts} with window={head.window} of head {name}"
    yield not fits, wrong, f"1 to {most}", "lower it or leave it out"


def circuit_rows(spec: Any) -> Rows:
    """Yield the rows of a circuit head's options and target."""
    head, target, rule = spec.head, spec.target_model_config, spec.rejection_sample_method
    wrong = f"rejection_sample_method={rule!r} with verify='coupled'"
    yield rule != "standard" and spec.verify == "coupled", wrong, "'standard'", "drop one of them"
    layers, theirs = head.lora_layers, getattr(target.hf_text_config, "num_hidden_layers", None)
    wrong = f"head {spec.model} has trunk 'lora', and target {target.model} is {target.architecture}"
    known, remedy = ", ".join(DRAFT_LAYER_TARGETS), "use a head with another trunk"
    yield layers and target.architecture not in DRAFT_LAYER_TARGETS, wrong, known, remedy
    ours = head.transformer_layer_config.get("num_hidden_layers")
    wrong = f"head {spec.model} has draft layers of a target with {ours} layers, but {target.model} has {theirs}"
    yield layers and ours not in (None, theirs), wrong, "heads of this target", "name another"
    if not spec.hosted:  # vLLM gives a hosted drafter the states that it needs
        yield final_norm_row(target)
    if not spec.has_backbone:
        return
    subject, remedy = f"backbone {spec.model}", "use a head with another trunk"
    yield from attention_rows(subject, target, remedy)
    has_states = _target_class_has(target, "set_aux_hidden_state_layers")
    yield not has_states, f"{subject}: {target.model} does not return its layers' states", "SupportsEagle3", remedy
    last, depth = max(spec.aux_layers), target.get_total_num_hidden_layers()
    yield last > depth, f"{subject} reads layer {last}", f"0 to {depth} of {target.model}", "use a head of it"
    yield spec.head_dtype != "auto", f"{subject} with head_dtype={spec.head_dtype}", "'auto'", "remove head_dtype"
    ranks, sizes = spec.target_parallel_config.tensor_parallel_size, ["heads", "width"]
    if ranks % head.trunk.kv_heads:  # else ranks share key and value heads
        sizes.append("kv_heads")
    for size in sizes:
        wrong = f"{subject} has trunk.{size}={getattr(head.trunk, size)}, with tensor_parallel_size={ranks}"
        yield getattr(head.trunk, size) % ranks, wrong, "a divisor of it", "lower tensor_parallel_size"


def ptp_rows(spec: Any) -> Rows:
    """Yield the rows of a PTP head's target."""
    target, subject, remedy = spec.target_model_config, "method 'ptp'", "use an MtPC head"
    kinds = getattr(target.hf_text_config, "layer_types", None) or ()
    is_partial = target.get_sliding_window() or any(kind != "full_attention" for kind in kinds)
    yield is_partial, f"{subject} on {target.model}", "targets with full attention alone", remedy
    yield from attention_rows(subject, target, remedy)
    if spec.head.late_width:  # other variants go through the target's own norm
        yield final_norm_row(target)


def attention_rows(subject: str, target: ModelConfig, remedy: str) -> Rows:
    """Yield the rows of targets whose attention the queries of a head do not have."""
    yield target.use_mla, f"{subject}: {target.model} compresses keys and values (MLA)", "other targets", remedy
    yield target.uses_mrope, f"{subject}: {target.model} has several positions per token", "other targets", remedy


def final_norm_row(target: ModelConfig) -> Row:
    """Return the row of targets whose hidden states come before their final norm."""
    wrong = f"target {target.model} is {target.architecture}, which returns hidden states from before its final norm"
    remedy = 'drop the head, or serve its own MTP layers: {"method": "mtp", "num_speculative_tokens": 1}'
    return target.architecture in BEFORE_NORM, wrong, "other targets", remedy


def engine_rows(spec: Any, vllm_config: Any) -> Rows:
    """Yield the rows of an engine with a head of any method."""
    is_v2, parallel = vllm_config.use_v2_model_runner, vllm_config.parallel_config
    backend, transfer = vllm_config.structured_outputs_config.backend, vllm_config.kv_transfer_config
    wrong = f"structured_outputs_config: backend={backend!r}, which refuses drafts in every request"
    yield backend == "lm-format-enforcer", wrong, "auto, xgrammar, guidance, outlines", "drop it"
    stages, is_async = parallel.pipeline_parallel_size, vllm_config.scheduler_config.async_scheduling
    remedy = f"{'drop --no-async-scheduling' if is_v2 else how_to_v2()}, or use tensor_parallel_size"
    wrong, allowed = f"pipeline_parallel_size={stages} with drafts", "Model Runner V2 with asynchronous scheduling"
    yield stages > 1 and not (is_v2 and is_async), wrong, allowed, remedy
    if not (subject := spec.second_pass):
        return
    yield not is_v2, f"{subject} on Model Runner V1", "Model Runner V2", f"{how_to_v2()}, or use another head"
    excluded = {
        "pipeline_parallel_size": stages > 1,
        "enable_lora": vllm_config.lora_config is not None,
        "decode_context_parallel_size": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size": getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "enable_dbo": getattr(parallel, "enable_dbo", False),
    }
    if spec.method == "ptp":
        model = vllm_config.model_config
        excluded |= {
            "kv_transfer_config": transfer is not None,
            "watermark_config": getattr(vllm_config, "watermark_config", None) is not None,
            # engines step together there, and the second pass takes no part in it
            "data_parallel_size on a mixture of experts": parallel.data_parallel_size > 1 and model.is_moe,
            # fitted to blocks of which some are reserved
            "max_model_len 'auto'": model.original_max_model_len == -1,
        }
    elif transfer and transfer.kv_connector:  # one that saves layers while the target runs would miss draft layers
        excluded["a KV connector that works layer by layer"] = _is_layerwise(transfer)
    for option, is_set in excluded.items():
        yield is_set, f"{subject} and {option}", "one of them in this version", f"drop {option}"


def circuit_engine_rows(spec: Any, vllm_config: Any) -> Rows:
    """Yield the rows of an engine with a circuit head."""
    yield from engine_rows(spec, vllm_config)
    head, rule = spec.head, spec.rejection_sample_method
    has_lora = vllm_config.lora_config is not None  # whose lm_head and embedding take the rows of the target's batch
    reads_rows, embeds = LEAVES.find(head.leaves.kind).needs_lm_head, TRUNKS.find(head.trunk.kind).needs_embedding
    yield has_lora and reads_rows, "enable_lora with leaves 'lm_head'", "leaves 'own'", "drop one of them"
    wrong = f"trunk {head.trunk.kind!r}, which reads the target's embeddings"
    yield has_lora and embeds, f"enable_lora with {wrong}", "trunk 'none'", "drop one of them"
    stages = vllm_config.parallel_config.pipeline_parallel_size
    wrong, remedy = f"pipeline_parallel_size={stages} with {wrong}", "use tensor_parallel_size"
    yield stages > 1 and embeds, f"{wrong} (the last stage has none)", "trunk 'none'", remedy
    is_v1 = not vllm_config.use_v2_model_runner
    has_rule = rule == "block" or (rule == "synthetic" and current_platform.is_cpu())  # V1 verifies token by token
    for option, is_set, allowed in (
        (f"rejection_sample_method {rule!r}", has_rule, "'standard'"),
        ("verify 'coupled'", spec.verify == "coupled", "'rejection'"),  # unseeded noise cannot be drawn again
    ):
        yield is_v1 and is_set, f"{option} on Model Runner V1", allowed, f"drop it, or {how_to_v2()}"


def how_to_v2() -> str:
    """Return what to type for Model Runner V2."""
    if current_platform.is_cpu():
        return "without a GPU type scripts/v2_on_cpu.sh vllm serve ... in the checkout of vllm_mtpc"
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        return "drop VLLM_USE_V2_MODEL_RUNNER=0"
    return "vLLM's log gives above why it chose V1"


def _target_class_has(target: ModelConfig, method: str) -> bool:
    from vllm.model_executor.model_loader.utils import get_model_cls

    return hasattr(get_model_cls(target), method)


def _is_layerwise(transfer: Any) -> bool:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    connector = KVConnectorFactory.get_connector_class(transfer)
    return connector.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config)
