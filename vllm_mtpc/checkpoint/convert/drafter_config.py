"""Read the config.json of a DFlash or DSpark drafter, in speculators' layout or in the authors'.

    speculators   its own keys at the top (aux_hidden_state_layer_ids, ...), draft layers in transformer_layer_config
    z-lab/dflash  a transformers config of the draft layers, its own keys in dflash_config (target_layer_ids, ...)
    DeepSpec      a transformers config of the draft layers, its own keys at the top; DFlash if markov_rank is 0

Layer ids: speculators numbers the layer inputs (id i: the input of layer i), the authors the layers (i - 1 outputs it).
Blocks: a block of b queries drafts b tokens if sampling starts at the anchor (the default of DSpark's own layout),
else b - 1, because the first query is x_1. A setting that a backbone head cannot have is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_mtpc.errors import CheckpointError, one_line

SPECULATORS = ("dflash", "dspark")
AUTHORS = {"DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark"}
# Settings of a target by which its embeddings or logits differ from the ones that a drafter was trained with.
SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier")


class Drafter(NamedTuple):
    """Settings of a drafter as a backbone head has them."""

    layout: str  # for provenance
    window: int
    drafts: int  # per step
    options: dict[str, Any]  # backbone_..., aux_hidden_state_layer_ids, sample_from_anchor
    mask_token_id: int
    markov_rank: int
    trained_on: str | None


class Rope(BaseModel):
    """Rotary positions of the draft layers."""

    model_config = ConfigDict(strict=True, extra="forbid")

    rope_theta: float = Field(gt=0)
    rope_type: Literal["default"] | None = None
    type: Literal["default"] | None = None
    partial_rotary_factor: float = Field(1, ge=1, le=1)


class DrafterConfig(BaseModel):
    """Keys of all layouts, with the values that a backbone head supports: Qwen3 layers with full attention."""

    model_config = ConfigDict(strict=True)

    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    rope_parameters: Rope
    rms_norm_eps: float = 1e-6
    hidden_act: Literal["silu"] = "silu"
    is_neox_style: Literal[True] = True
    attention_bias: Literal[False] = False
    partial_rotary_factor: float = Field(1, ge=1, le=1)
    quantization_config: None = None
    layer_types: list[str] = []
    sliding_window: int | None = None
    swa_window_size: int | None = None
    sliding_window_non_causal: bool = False
    causal: Literal[False] | None = None
    is_causal: Literal[False] | None = None
    add_swa_attention_sink_bias: Literal[False] = False
    use_aux_hidden_state: Literal[True] = True
    logit_scale: float = Field(1, ge=1, le=1)
    block_size: int = Field(ge=1)
    mask_token_id: int = Field(ge=0)
    markov_rank: int = Field(0, ge=0)
    markov_head_type: Literal["vanilla"] = "vanilla"
    sample_from_anchor: bool | None = None
    aux_hidden_state_layer_ids: list[int] = []  # speculators
    target_layer_ids: list[int] = []  # the authors
    # These must be the target's.
    hidden_size: int | None = None
    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    draft_vocab_size: int | None = None
    vocab_size: int | None = None


def read_drafter(file: Path, values: Mapping[str, Any], target: Mapping[str, Any]) -> Drafter:
    """Read a drafter's config.

    Args:
        file: Named in errors.
        values: Its content.
        target: The config of the target's language model.

    Raises:
        CheckpointError: A setting is missing, or not one that a backbone head for `target` can have.
    """
    is_speculators = "speculators_model_type" in values
    kind = _kind(file, values)
    config = _validate(file, values, kind)
    _check_target(file, config, target)
    _check_attention(file, config, target)
    markov_rank = config.markov_rank if kind == "dspark" else 0
    anchor = config.sample_from_anchor
    if anchor is None:
        anchor = kind == "dspark" and not is_speculators
    drafts = config.block_size if anchor else config.block_size - 1
    if drafts < 1:
        raise CheckpointError(f"{file}: block_size = 1 drafts no token; allowed: 2 or more; convert another drafter")
    speculators = _section(values, "speculators_config")
    methods = speculators.get("proposal_methods")
    proposed = methods[0].get("speculative_tokens") if isinstance(methods, list) and methods else None
    trained_on = _section(speculators, "verifier").get("name_or_path")
    options = {
        "backbone_layers": config.num_hidden_layers,
        "backbone_heads": config.num_attention_heads,
        "backbone_kv_heads": config.num_key_value_heads,
        "backbone_theta": float(config.rope_parameters.rope_theta),
        "backbone_eps": float(config.rms_norm_eps),
        "aux_hidden_state_layer_ids": _layer_ids(file, config, is_speculators, target),
        "sample_from_anchor": anchor,
    }
    return Drafter(
        layout=f"{'speculators' if is_speculators else 'its authors'}' {kind}",
        window=drafts + 1,
        drafts=min(proposed, drafts) if type(proposed) is int and proposed >= 1 else drafts,
        options=options,
        mask_token_id=config.mask_token_id,
        markov_rank=markov_rank,
        trained_on=trained_on if isinstance(trained_on, str) else None,
    )


def _section(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    section = values.get(key)
    return section if isinstance(section, dict) else {}


def _error(file: Path, key: str, value: Any, allowed: str) -> CheckpointError:
    return CheckpointError(f"{file}: {key} = {value!r}; allowed: {allowed}; convert another drafter")


def _kind(file: Path, values: Mapping[str, Any]) -> str:
    if "speculators_model_type" in values:
        kind = values["speculators_model_type"]
        if kind not in SPECULATORS:
            raise _error(file, "speculators_model_type", kind, ", ".join(SPECULATORS))
        return kind
    named = values.get("architectures")
    kinds = [AUTHORS[name] for name in named if name in AUTHORS] if isinstance(named, list) else []
    if not kinds:
        raise _error(file, "architectures", named, ", ".join(AUTHORS))
    return kinds[0]


def _validate(file: Path, values: Mapping[str, Any], kind: str) -> DrafterConfig:
    """Merge the sections of all layouts into one mapping without nulls, and validate it."""
    own = _section(values, "dflash_config")
    for key in sorted(own.keys() - DrafterConfig.model_fields.keys()):
        if own[key] not in (None, False):
            raise _error(file, f"dflash_config.{key}", own[key], "none")
    merged = {**_section(values, "transformer_layer_config"), **values, **own}
    merged = {key: value for key, value in merged.items() if value is not None}
    scaling = merged.get("rope_scaling", {})
    if not merged.get("rope_parameters") and isinstance(scaling, dict):
        merged["rope_parameters"] = {**scaling, "rope_theta": merged.get("rope_theta")}
    if kind == "dflash" or not merged.get("markov_rank"):
        merged.pop("markov_head_type", None)
    try:
        return DrafterConfig.model_validate(merged)
    except ValidationError as error:
        raise CheckpointError(f"{file}: {one_line(error, DrafterConfig)}; convert another drafter") from None


def _check_target(file: Path, config: DrafterConfig, target: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the drafter reads the embeddings and logits of `target` unscaled."""
    vocab_size, layers = target["vocab_size"], target.get("num_hidden_layers")
    for key, expected in (
        ("hidden_size", target["hidden_size"]),
        ("target_hidden_size", target["hidden_size"]),
        ("num_target_layers", layers),
        ("draft_vocab_size", vocab_size),
    ):
        if (value := getattr(config, key)) not in (None, expected):
            raise _error(file, key, value, f"{expected}, the target's")
    if config.vocab_size is not None and config.vocab_size < vocab_size:
        raise _error(file, "vocab_size", config.vocab_size, f"{vocab_size}, the target's")
    if scales := [f"{key} = {target[key]}" for key in SCALES if target.get(key) not in (None, 1)]:
        raise CheckpointError(
            f"{file}: the target has {', '.join(scales)}, which a drafter does not apply; train a head for this target"
        )
    if str(target.get("model_type")).startswith("gemma"):
        raise CheckpointError(
            f"{file}: a target of type {target['model_type']} scales its embeddings; train a head for this target"
        )


def _check_attention(file: Path, config: DrafterConfig, target: Mapping[str, Any]) -> None:
    """Raise CheckpointError for sliding windows, unless they cover any text of the target in both directions."""
    types = set(config.layer_types) - {"full_attention"}
    window, longest = config.swa_window_size or config.sliding_window, target.get("max_position_embeddings")
    is_full = type(longest) is int and window is not None and window >= longest
    is_full &= config.sliding_window_non_causal or config.causal is False
    if types and not (types == {"sliding_attention"} and is_full):
        allowed = f"full_attention, or sliding_attention in both directions over {longest} tokens"
        raise _error(file, "layer_types", sorted(types), allowed)


def _layer_ids(file: Path, config: DrafterConfig, is_speculators: bool, target: Mapping[str, Any]) -> list[int]:
    """Return the layers read, as the number of the target's layers before each state."""
    key, offset = ("aux_hidden_state_layer_ids", 0) if is_speculators else ("target_layer_ids", 1)
    ids, last = getattr(config, key), target.get("num_hidden_layers", 0) - 1
    if not ids or not all(0 <= i + offset <= last for i in ids):
        raise _error(file, key, ids, f"numbers from {-offset} to {last - offset} of the target's layers")
    return [i + offset for i in ids]
