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
from typing import Any, Literal

from pydantic import AliasPath, BaseModel, ConfigDict, Field, ValidationError

from vllm_mtpc.errors import CheckpointError, one_line

AUTHORS = {"DFlashDraftModel": "dflash", "Qwen3DSparkModel": "dspark"}  # by class
# Settings of a target by which its embeddings or logits differ from the ones that a drafter was trained with.
SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "embedding_multiplier")


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

    speculators_model_type: Literal["dflash", "dspark"] | None = None
    kind: Literal["dflash", "dspark"]
    trained_on: str | None = Field(None, validation_alias=AliasPath("speculators_config", "verifier", "name_or_path"))
    proposed: int | None = Field(
        None, ge=1, validation_alias=AliasPath("speculators_config", "proposal_methods", 0, "speculative_tokens")
    )
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
    layer_types: list[Literal["full_attention"]] = []
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
    num_target_layers: int | None = None
    draft_vocab_size: int | None = None

    @property
    def layout(self) -> str:
        """The layout's name for provenance."""
        return f"{'speculators' if self.speculators_model_type else 'its authors'}' {self.kind}"

    @property
    def starts_at_anchor(self) -> bool:
        """Whether the first query of a block drafts a token."""
        default = self.kind == "dspark" and self.speculators_model_type is None
        return default if self.sample_from_anchor is None else self.sample_from_anchor

    @property
    def window(self) -> int:
        """The head's n: x_1 and the drafts of a block."""
        return self.block_size + self.starts_at_anchor

    @property
    def drafts(self) -> int:
        """Drafts per step."""
        return min(self.window - 1, self.proposed or self.window)

    @property
    def layer_ids(self) -> list[int]:
        """The layers of the target whose inputs are read."""
        return (
            self.aux_hidden_state_layer_ids if self.speculators_model_type else [i + 1 for i in self.target_layer_ids]
        )


def read_drafter(file: Path, values: Mapping[str, Any], target: Mapping[str, Any]) -> DrafterConfig:
    """Read the config of a drafter; raises CheckpointError for a setting that a backbone head cannot have."""
    try:
        config = DrafterConfig.model_validate(_merge_sections(file, values))
    except ValidationError as error:
        raise CheckpointError(f"{file}: {one_line(error, DrafterConfig)}; convert another drafter") from None
    ids, layers = config.layer_ids, target.get("num_hidden_layers", 0)
    if not ids or not all(0 <= i < layers for i in ids):
        raise _error(file, "layers read", ids, f"numbers from 0 to {layers - 1}, of the target's layers")
    for key, wanted in (("num_target_layers", layers), ("draft_vocab_size", target["vocab_size"])):
        if (value := getattr(config, key)) not in (None, wanted):
            raise _error(file, key, value, f"{wanted}, the target's")
    scales = [f"{key} = {target[key]}" for key in SCALES if target.get(key) not in (None, 1)]
    if scales or str(target.get("model_type")).startswith("gemma"):  # whose embeddings are scaled
        raise CheckpointError(
            f"{file}: the target, of type {target.get('model_type')}, scales its embeddings or logits "
            f"({', '.join(scales)}), which a drafter does not; train a head for this target"
        )
    return config


def _error(file: Path, key: str, value: Any, allowed: str) -> CheckpointError:
    return CheckpointError(f"{file}: {key} = {value!r}; allowed: {allowed}; convert another drafter")


def _merge_sections(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the sections of all layouts into one mapping without nulls, and add `kind`."""
    layers, own = (
        part if isinstance(part := values.get(key), dict) else {}
        for key in ("transformer_layer_config", "dflash_config")
    )
    for key in sorted(own.keys() - DrafterConfig.model_fields.keys()):
        if own[key] not in (None, False):
            raise _error(file, f"dflash_config.{key}", own[key], "none")
    merged = {key: value for key, value in {**layers, **values, **own}.items() if value is not None}
    named = merged.get("architectures")
    kind = merged.get("speculators_model_type") or next(
        (AUTHORS[name] for name in (named if isinstance(named, list) else []) if name in AUTHORS), None
    )
    if kind is None:
        raise _error(file, "architectures", named, ", ".join(AUTHORS))
    scaling = merged.get("rope_scaling", {})
    if not merged.get("rope_parameters") and isinstance(scaling, dict):
        merged["rope_parameters"] = {**scaling, "rope_theta": merged.get("rope_theta")}
    if kind == "dflash":
        merged.pop("markov_rank", None)
    if not merged.get("markov_rank"):
        merged.pop("markov_head_type", None)
    return merged | {"kind": kind}
