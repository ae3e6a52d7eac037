"""Convert a DFlash or DSpark drafter into a head of kind `backbone`: ff, with token_rank for DSpark's Markov head.

The config.json has one of three layouts:

    speculators   its own keys at the top (aux_hidden_state_layer_ids, ...), draft layers in transformer_layer_config
    z-lab/dflash  a transformers config of the draft layers, its own keys in dflash_config (target_layer_ids, ...)
    DeepSpec      a transformers config of the draft layers, its own keys at the top; DFlash if markov_rank is 0

Layer ids: speculators numbers the layer inputs (id i: the input of layer i), the authors the layers (i - 1 outputs it).
Blocks: a block of b queries drafts b tokens if sampling starts at the anchor (the default of DSpark's own layout),
else b - 1, because the first query is x_1. A setting that a backbone head cannot have is an error.

Tensors have the same names in all of them:

    layers.*, fc, hidden_norm, norm      kept, below `backbone.`
    markov_head.markov_w1 [V, R], w2     token_source, and token_target [n - 1, R, V]: the same for all positions
    embed_tokens, lm_head                left out; must equal the target's, which the head reads
    mask_embedding.pt                    backbone.mask_embedding; without the file, row mask_token_id of the embeddings
    confidence_head.*                    left out: a circuit computes its own acceptance
    verifier_norm, verifier_lm_head      left out: the target's

Drafts do not change: the same layers read the same states and give the same logits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasPath, BaseModel, ConfigDict, Field
from torch import Tensor

from vllm_mtpc.checkpoint.convert.source import MASK_FILE, ConvertOptions, load_tensors, target_config
from vllm_mtpc.checkpoint.convert.write import save_converted
from vllm_mtpc.checkpoint.load import Shards
from vllm_mtpc.checkpoint.locate import CONFIG_FILE, download
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import CheckpointError, validate
from vllm_mtpc.files import read_json

EMBEDDINGS, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
_LEFT_OUT = re.compile(r"confidence_head\..*|verifier_(norm|lm_head)\.weight")
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
    def starts_at_anchor(self) -> bool:
        """Whether the first query of a block drafts a token."""
        default = self.kind == "dspark" and self.speculators_model_type is None
        return default if self.sample_from_anchor is None else self.sample_from_anchor

    @property
    def window(self) -> int:
        """The head's n: x_1 and the drafts of a block."""
        return self.block_size + self.starts_at_anchor

    @property
    def layer_ids(self) -> list[int]:
        """The layers of the target whose inputs are read."""
        return (
            self.aux_hidden_state_layer_ids if self.speculators_model_type else [i + 1 for i in self.target_layer_ids]
        )


def read_drafter(file: Path, values: Mapping[str, Any], target: Mapping[str, Any]) -> DrafterConfig:
    """Read the config of a drafter; raises CheckpointError for a setting that a backbone head cannot have."""
    merged, remedy = _merge_sections(file, values), "; convert another drafter"
    config = validate(DrafterConfig, merged, CheckpointError, f"{file}: ", remedy)
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


def convert_drafter(options: ConvertOptions, label: str) -> str:
    """Convert the drafter in the folder `options.ckpt` as `convert`; `label` is its name for provenance."""
    folder, target = options.ckpt, target_config(options.target)
    given = read_drafter(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE), target)
    source, place = Shards(folder), Path(options.target)
    target_shards = Shards(place if place.is_dir() else download(options.target, "target"))
    tensors, left_out = _read_tensors(given, source, target["vocab_size"])
    left_out += _compare_with_target(given, source, target_shards, target)
    tensors["backbone.mask_embedding"], mask_source = _read_mask(given, source, target_shards)
    config = HeadConfig.create(
        circuit="ff",
        window=given.window,
        num_components=1,
        num_speculative_tokens=min(given.window - 1, given.proposed or given.window),
        head="backbone",
        token_rank=given.markov_rank or None,
        backbone_layers=given.num_hidden_layers,
        backbone_heads=given.num_attention_heads,
        backbone_kv_heads=given.num_key_value_heads,
        backbone_theta=float(given.rope_parameters.rope_theta),
        backbone_eps=float(given.rms_norm_eps),
        backbone_head_dim=source.read("layers.0.self_attn.q_norm.weight").shape[0],
        backbone_width=source.read("layers.0.mlp.gate_proj.weight").shape[0],
        aux_hidden_state_layer_ids=given.layer_ids,
        sample_from_anchor=given.starts_at_anchor,
        **options.config_fields(target),
    )
    layout = f"{'speculators' if given.speculators_model_type else 'its authors'}' {given.kind}"
    record = {"from": label, "layout": layout, "trained_on": given.trained_on, "mask": mask_source}
    title = f"{'DSpark' if given.markov_rank else 'DFlash'} drafter as a backbone head: n={config.window}"
    save_converted(options.out, config, tensors, title, record | {"left_out": left_out})
    return f"{config.circuit}, backbone, window {config.window}; left out: {', '.join(left_out) or 'nothing'}"


def _read_tensors(given: DrafterConfig, source: Shards, vocab_size: int) -> tuple[dict[str, Tensor], list[str]]:
    """Return the head's tensors except the mask, and the names of tensors left out. Embeddings are not read."""
    tensors, left_out = {}, []
    for name in sorted(source.files.keys() - {EMBEDDINGS, LM_HEAD}):
        if _LEFT_OUT.fullmatch(name) or (name in MARKOV and not given.markov_rank):
            left_out.append(name)
        elif name not in MARKOV:  # an unknown one is refused with the shapes of all
            tensors[f"backbone.{name}"] = source.read(name)
    if given.markov_rank:
        w1, w2 = (source.read(name) for name in MARKOV)
        tensors["token_source"] = w1[:vocab_size]  # it may have more rows than the target has ids
        tensors["token_target"] = w2.T[None].repeat(given.window - 1, 1, 1)
    return tensors, left_out


def _compare_with_target(
    given: DrafterConfig, source: Shards, target_shards: Shards, target: dict[str, Any]
) -> list[str]:
    """Return which of embeddings and lm_head the drafter has. Raises CheckpointError if one is not the target's.

    The mask's row may differ: it is read from the drafter. Rows after the vocabulary are padding.
    """
    equal, size = [], (target["vocab_size"], target["hidden_size"])
    for name in source.files.keys() & {EMBEDDINGS, LM_HEAD}:
        a, b = source.read(name), target_shards.read(_target_name(target_shards, name, target))
        if any(tensor.dim() != 2 or len(tensor) < size[0] or tensor.shape[1] != size[1] for tensor in (a, b)):
            raise CheckpointError(
                f"{source.folder}: {name} is {tuple(a.shape)}, the target's {tuple(b.shape)}; allowed: {size}; name "
                "the target it was trained on"
            )
        narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
        is_other = (a[: size[0]].to(narrow) != b[: size[0]].to(narrow)).any(dim=1)
        if name == EMBEDDINGS:
            is_other[given.mask_token_id : given.mask_token_id + 1] = False
        if (differing := int(is_other.sum())) > 0:
            raise CheckpointError(
                f"{source.folder}: {name} is not the target's: {differing} of {size[0]} rows differ, row "
                f"{int(is_other.nonzero()[0])} first; name the target it was trained on, or convert a drafter that "
                "did not train its embeddings and lm_head"
            )
        equal.append(f"{name} (the target's)")
    return sorted(equal)


def _target_name(target_shards: Shards, name: str, target: dict[str, Any]) -> str:
    found = target_shards.find_suffix(name)
    if found is None and name == LM_HEAD and target.get("tie_word_embeddings", True):
        found = target_shards.find_suffix(EMBEDDINGS)
    if found is None:
        raise CheckpointError(f"{target_shards.folder}: has no single {name}; name the target it was trained on")
    return found


def _read_mask(given: DrafterConfig, source: Shards, target_shards: Shards) -> tuple[Tensor, str]:
    """Return the input of the first layer for a mask, [D], and its source."""
    number, file = given.mask_token_id, source.folder / MASK_FILE
    if file.is_file():
        state = load_tensors(file)
        state = state if isinstance(state, dict) else {"embedding": state}
        value = state.get("embedding")
        if state.get("mask_token_id", number) != number or not isinstance(value, Tensor):
            raise CheckpointError(f"{file}: expected: the embedding of mask_token_id={number}; copy the drafter again")
        return value.reshape(-1), MASK_FILE
    place, owner = (source, "its own") if EMBEDDINGS in source.files else (target_shards, "the target's")
    rows = place.read(_target_name(place, EMBEDDINGS, {}))
    if number >= len(rows):
        raise CheckpointError(
            f"{source.folder}: mask_token_id={number}, but the embeddings of {place.folder} have {len(rows)} rows; "
            "name the target it was trained on"
        )
    return rows[number], f"row {number} of {owner} embeddings"
