"""Convert an MtPC head of the paper's authors.

A checkpoint is `model@STEP.pt`, a pickled dict whose `model_state_dict` has the head, its adapters, and None for every
weight of the target, and a `config.yaml` next to it. Tensors, n tokens, r components:

    mt_head._categorical_log_probs_heads.0.head.proj    [n, r, V, D]      leaves by fold
    mt_head._sum_weights_heads.K.head.proj              [F, out, in, D]   K = 0, 1, ... from the leaves to the root
    circuit._circuit._nodes.0._scope_idx                [n, 1]            token position of each fold of the leaves
    circuit._circuit._address_book._in_fold_idx_L_0     [F, inputs]       folds that layer L reads

A head here has leaves by position, sums from the leaves to the root, and those of an HMM by position. The distribution
does not change: logits are the same linear maps of the same hidden state, normalised over the same dimension. Unknown
tensors, keys and wirings are errors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from vllm_mtpc.checkpoint.convert.mtpc_settings import Settings
from vllm_mtpc.checkpoint.convert.mtpc_tensors import order_sums, read_positions, sort_tensors
from vllm_mtpc.checkpoint.convert.source import (
    SETTINGS_FILE,
    ConvertOptions,
    narrowest_dtype,
    target_config,
    to_peft_names,
)
from vllm_mtpc.checkpoint.load import check_adapter_shapes, module_names, shapes_of
from vllm_mtpc.checkpoint.locate import verifier_name
from vllm_mtpc.checkpoint.metadata import converted_card
from vllm_mtpc.checkpoint.save import save_head
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import CheckpointError, printable
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.adapters import ALLOWED_LAYERS, Adapters

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _CircuitSettings(_Section):
    """circuit.model. Other kinds (random-btree) have no order of positions."""

    target_: Any = Field(None, alias="_target_")
    kind: Literal["fully-factorized", "cp", "hmm", "btree"] = "cp"
    n_token: int = Field(ge=1)
    n_component: int = Field(ge=1)
    n_repetition: int = Field(1, ge=1, le=1)
    vocab_size: int | None = Field(None, ge=1)


class _HeadSettings(_Section):
    """mt_head.hyperparameters. Keys of type Any are about the start of training, or for other expanders."""

    type: Literal["evabyte"]
    expander_type: Literal["linear"] = "linear"
    transformer_n_layer: int = Field(0, ge=0, le=0)
    contextual_hmm_weights: bool = True
    share_sum_weights: bool = False
    init_hmm_identity: bool = False
    expander_hidden_size: Any = None
    expander_n_layer: Any = None
    expander_use_skip: Any = None
    freeze_vocab_unembedding: Any = None
    n_embd: Any = None
    transformer_n_head: Any = None


class _AdapterSettings(_Section):
    """adaptor.hyperparameters."""

    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0)
    layers_to_transform: list[int] | None = None
    lora_dropout: Any = None
    target_modules: Any = None


def convert_mtpc(options: ConvertOptions, content: Mapping[str, Any], label: str) -> str:
    """Write the head folder `options.out` of an MtPC checkpoint.

    Args:
        options: Of the conversion.
        content: Of the file `options.ckpt`.
        label: Name of the checkpoint for provenance.

    Returns:
        A short description of the head.

    Raises:
        CheckpointError: The checkpoint has a setting or tensor that a head cannot have, or is of another target.
        HeadConfigError: Its settings are not possible for a head.
    """
    path, target = options.ckpt, target_config(options.target)
    file = path.with_name(SETTINGS_FILE)
    settings = Settings(file)
    circuit = settings.section("circuit.model", _CircuitSettings)
    expander = settings.section("mt_head.hyperparameters", _HeadSettings)
    if circuit is None or expander is None:
        raise CheckpointError(f"{file}: has no circuit.model or no mt_head.hyperparameters; copy it again")
    for key, wanted, kinds in (
        ("contextual_hmm_weights", True, ("hmm",)),
        ("share_sum_weights", False, ("hmm", "btree")),
    ):
        if circuit.kind in kinds and getattr(expander, key) is not wanted:
            raise CheckpointError(f"{file}: {key} = {not wanted}; allowed: {wanted}; convert another head")
    n, r = circuit.n_token, circuit.n_component
    is_ff = circuit.kind == "fully-factorized" or (circuit.kind == "cp" and r == 1)
    name = "ff" if is_ff else circuit.kind
    found = sort_tensors(path, content["model_state_dict"])
    _check_sizes(path, tuple(found.leaf.shape), (n, r, circuit.vocab_size), target)

    position = read_positions(path, name, n, found.scope)
    fold = [position.index(k) for k in range(n)]
    needs_bias = name == "hmm" and r > 1 and expander.init_hmm_identity
    sums, biases = order_sums(path, name, fold, r, found, needs_bias)
    tensors = {"leaf_weight": found.leaf if fold == list(range(n)) else found.leaf[fold], **sums}
    adapters = _read_adapters(path, found.lora, settings, target)
    config = HeadConfig.create(
        circuit=name,
        window=n,
        num_components=r,
        target=target,
        verifier=verifier_name(options.target, options.out),
        lora_layers=adapters.num_layers if adapters else 0,
        **options.trained_sampling,
    )
    with torch.device("meta"):
        head = build_head(config)
    head.load_state_dict(tensors, assign=True)
    if found.skipped:
        names = printable(", ".join(found.skipped), 300)
        print(f"warning: {path}: weights of the target are left out: {names}", file=sys.stderr)
    record = {"from": label, "trained_on": settings.value("lm.model.from_huggingface"), "fold_order": position}
    record |= {"global_step": step} if isinstance(step := content.get("global_step"), int) else {}
    record |= {"inner_bias": biases} if biases else {}
    card = converted_card(config, f"MtPC head: {name}, n={n}, r={r}", label)
    dtype = narrowest_dtype(tensors.values())
    save_head(options.out, config, head, {"converted": record}, card, dtype, adapters)
    lora = f", {config.lora_layers} draft layers" if config.lora_layers else ""
    return f"{name}, window {n}, {r} components{lora}"


def _check_sizes(
    path: Path, leaf: tuple[int, ...], stated: tuple[int, int, int | None], target: Mapping[str, Any]
) -> None:
    """Raise CheckpointError unless leaves of this shape are those of config.yaml and of the target."""
    if leaf[:2] != stated[:2] or stated[2] not in (None, leaf[2]):
        raise CheckpointError(
            f"{path}: leaves are {leaf} (n, r, V, D), but {SETTINGS_FILE} has n, r, V = {stated}; keep a checkpoint "
            f"and its own {SETTINGS_FILE} together"
        )
    if leaf[2:] != (sizes := (target.get("vocab_size"), target.get("hidden_size"))):
        raise CheckpointError(
            f"{path}: leaves of V, D = {leaf[2]}, {leaf[3]}; the target has {sizes[0]}, {sizes[1]}; name the target it "
            "was trained on"
        )


def _read_adapters(
    path: Path, lora: Mapping[str, Tensor], settings: Settings, target: Mapping[str, Any]
) -> Adapters | None:
    """Return the adapters of a checkpoint; raises CheckpointError if they are not of the target's last layers."""
    given = settings.section("adaptor.hyperparameters", _AdapterSettings)
    if given is None and not lora:
        return None
    if given is None or not lora:
        raise CheckpointError(
            f"{path}: has {len(lora)} adapter tensors, but config.yaml has adaptor.hyperparameters = {given}; keep the "
            "checkpoint and its own config.yaml together"
        )
    tensors = to_peft_names(path, lora)
    layers = sorted({int(match[1]) for match in map(_LAYER.search, tensors) if match})
    total, stated = target.get("num_hidden_layers"), given.layers_to_transform
    end = max(layers, default=-1) + 1 if total is None else total
    is_last = len(layers) in ALLOWED_LAYERS and layers == list(range(end - len(layers), end))
    if not is_last or stated not in (None, layers):
        raise CheckpointError(
            f"{path}: adapters on layers {layers} of {total}, config.yaml has {stated}; allowed: the last "
            f"{', '.join(map(str, ALLOWED_LAYERS))} layers of the target, and the same in both; name the target it was "
            "trained on"
        )
    check_adapter_shapes(path, shapes_of(tensors), layers, given.r, target["hidden_size"])
    return Adapters(layers, given.r, given.lora_alpha, module_names(tensors), tensors)
