"""An MtPC head of the paper's authors as a head folder.

Their files are `model@STEP.pt`, a pickled dict whose `model_state_dict` has the head and its adapters, and None for
every weight of the target, and a `config.yaml` next to it. Their tensors, n tokens, r components:

    mt_head._categorical_log_probs_heads.0.head.proj    [n, r, V, D]      leaves by fold
    mt_head._sum_weights_heads.K.head.proj              [F, out, in, D]   K = 0, 1, ... from the leaves to the root
    circuit._circuit._nodes.0._scope_idx                [n, 1]            token position of each fold of the leaves
    circuit._circuit._address_book._in_fold_idx_L_0     [F, inputs]       what the folds of layer L read

Here leaves go by position, sums from the leaves to the root, those of an HMM by position. The distribution is
theirs: logits are the same linear maps of the same hidden state, normalised over the same dimension. What is not known
here (tensors, keys, wirings) is refused by name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.convert.source import SETTINGS_FILE, ConvertOptions, adapters_of, narrowest, target_config
from vllm_mtpc.checkpoint.convert.tensors import Tensors, sort_tensors, sum_tensors
from vllm_mtpc.checkpoint.convert.yaml import Settings
from vllm_mtpc.checkpoint.load import check_adapter_shapes, module_names
from vllm_mtpc.checkpoint.locate import verifier_name
from vllm_mtpc.checkpoint.metadata import converted_card
from vllm_mtpc.checkpoint.save import save_head
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import CheckpointError, printable
from vllm_mtpc.heads import build_head
from vllm_mtpc.heads.adapters import ALLOWED_LAYERS, Adapters

# Their kinds of circuits that are built here; others (random-btree) have no position order.
KINDS = ("fully-factorized", "cp", "hmm", "btree")
_CIRCUIT_KEYS = ("_target_", "kind", "n_component", "n_repetition", "n_token", "vocab_size")
_HEAD_KEYS = (  # of mt_head.hyperparameters; those not read say how training started, or belong to other expanders
    "contextual_hmm_weights",
    "expander_hidden_size",
    "expander_n_layer",
    "expander_type",
    "expander_use_skip",
    "freeze_vocab_unembedding",
    "init_hmm_identity",
    "n_embd",
    "share_sum_weights",
    "transformer_n_head",
    "transformer_n_layer",
    "type",
)
_ADAPTERS = "adaptor.hyperparameters"
_ADAPTER_KEYS = ("layers_to_transform", "lora_alpha", "lora_dropout", "r", "target_modules")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class _Head(NamedTuple):
    """What config.yaml says of the head."""

    circuit: str  # ff, cp, hmm or btree
    window: int
    components: int
    vocab_size: int | None
    needs_bias: bool  # the sums of an HMM started at the identity, so they have a bias


def convert_mtpc(options: ConvertOptions, file: Mapping[str, Any], label: str) -> HeadConfig:
    """Write the head folder `options.out` of what `options.ckpt` holds; returns its config.

    `label` is what provenance calls the file. Raises CheckpointError or HeadConfigError.
    """
    path = options.ckpt
    settings = Settings.read(path.with_name(SETTINGS_FILE))
    given = _read_settings(settings, path.with_name(SETTINGS_FILE))
    found = sort_tensors(path, file["model_state_dict"])
    target = target_config(options.target)
    _check_sizes(path, given, tuple(found.leaf.shape), target)
    tensors, record = _tensors(path, given, found)
    adapters = _adapters(path, found.lora, settings, target)
    config = HeadConfig.create(
        circuit=given.circuit,
        window=given.window,
        num_components=given.components,
        target=target,
        verifier=verifier_name(options.target, options.out),
        lora_layers=adapters.num_layers if adapters else 0,
        **options.trained_sampling,
    )
    with torch.device("meta"):
        head = build_head(config)
    head.load_state_dict(tensors, assign=True)
    if found.skipped:
        more = f" and {len(found.skipped) - 2} more" if len(found.skipped) > 2 else ""
        names = printable(", ".join(found.skipped[:2]) + more, 300)
        print(f"warning: {path}: weights of the target left out: {names}", file=sys.stderr)
    step = {"global_step": file["global_step"]} if isinstance(file.get("global_step"), int) else {}
    record = {"from": label, "trained_on": settings.value("lm.model.from_huggingface"), **step, **record}
    lora = f", {config.lora_layers} draft layers with LoRA" if config.lora_layers else ""
    verifier = config.speculators_config.verifier.name_or_path
    about = f"Converted from `{label}` by `vllm-mtpc convert`; target `{verifier}`{lora}."
    card = converted_card(config, f"MtPC head: {config.circuit}, n={config.window}, r={config.num_components}", about)
    save_head(options.out, config, head, {"converted": record}, card, narrowest(tensors), adapters)
    return config


def _read_settings(settings: Settings, file: Path) -> _Head:
    circuit = settings.section("circuit.model", _CIRCUIT_KEYS)
    head = settings.section("mt_head.hyperparameters", _HEAD_KEYS)

    def refuse(key: str, value: Any, allowed: str) -> CheckpointError:
        return CheckpointError(f"{file}: {key} = {value!r}; allowed: {allowed}; convert a head made so")

    value: Any
    default: Any
    for key, default in (("n_token", None), ("n_component", None), ("n_repetition", 1), ("vocab_size", 1)):
        if type(value := circuit.get(key, default)) is not int or value < 1:
            raise refuse(f"circuit.model.{key}", value, "numbers from 1")
    if (kind := circuit.get("kind", "cp")) not in KINDS:
        raise refuse("circuit.model.kind", kind, ", ".join(KINDS))
    if circuit.get("n_repetition", 1) != 1:
        raise refuse("circuit.model.n_repetition", circuit["n_repetition"], "1")
    for key, default, wanted, kinds in (
        ("type", "vanilla", "evabyte", KINDS),
        ("expander_type", "linear", "linear", KINDS),
        ("transformer_n_layer", 0, 0, KINDS),
        ("contextual_hmm_weights", True, True, ("hmm",)),
        ("share_sum_weights", False, False, ("hmm", "btree")),
    ):
        if kind in kinds and (value := head.get(key, default)) != wanted:
            raise refuse(f"mt_head.hyperparameters.{key}", value, repr(wanted))
    components = circuit["n_component"]
    is_ff = kind == "fully-factorized" or (kind == "cp" and components == 1)
    return _Head(
        "ff" if is_ff else kind,
        circuit["n_token"],
        components,
        circuit.get("vocab_size"),
        kind == "hmm" and components > 1 and bool(head.get("init_hmm_identity", False)),
    )


def _check_sizes(path: Path, given: _Head, leaf: tuple[int, ...], target: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless leaves of this shape are those of config.yaml and of the target."""
    stated = (given.window, given.components, given.vocab_size or leaf[2], leaf[3])
    if leaf != stated:
        raise CheckpointError(
            f"{path}: leaves are {leaf} (n, r, V, D), but {SETTINGS_FILE} says {stated}; keep a checkpoint and its own "
            f"{SETTINGS_FILE} together"
        )
    if leaf[2:] != (sizes := (target.get("vocab_size"), target.get("hidden_size"))):
        raise CheckpointError(
            f"{path}: leaves of V, D = {leaf[2]}, {leaf[3]}; the target has {sizes[0]}, {sizes[1]}; name the target it "
            "was trained on"
        )


def _tensors(path: Path, given: _Head, found: Tensors) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The head's tensors by our names, and what of their making is worth a record."""
    n = given.window
    position = list(range(n)) if given.circuit != "hmm" else list(reversed(range(n)))  # where the file does not say
    if found.scope is not None:
        position = found.scope.flatten().tolist()
    if sorted(position) != list(range(n)):
        raise CheckpointError(f"{path}: _scope_idx = {position}; allowed: each of 0 to {n - 1} once; copy it again")
    fold = [position.index(k) for k in range(n)]
    sums, biases = sum_tensors(path, given.circuit, fold, given.components, found, given.needs_bias)
    leaf = found.leaf if fold == list(range(n)) else found.leaf[fold]
    return {"leaf_weight": leaf, **sums}, {"fold_order": position, **({"inner_bias": biases} if biases else {})}


def _adapters(path: Path, lora: Mapping[str, Tensor], settings: Settings, target: Mapping[str, Any]) -> Adapters | None:
    """The adapters of a checkpoint, None without; raises CheckpointError where they are not of the last layers."""
    given = settings.section(_ADAPTERS, _ADAPTER_KEYS)
    if not lora and not given:
        return None
    rank: Any = given.get("r")
    alpha: Any = given.get("lora_alpha")
    if not lora or type(rank) is not int or type(alpha) not in (int, float) or alpha <= 0:
        raise CheckpointError(
            f"{path}: has {len(lora)} adapter tensors, but config.yaml says {_ADAPTERS}: r = {rank}, lora_alpha = "
            f"{alpha}; keep the checkpoint and its own config.yaml together"
        )
    tensors = adapters_of(path, lora)
    layers = sorted({int(match[1]) for match in map(_LAYER.search, tensors) if match})
    total, stated = target.get("num_hidden_layers"), given.get("layers_to_transform")
    end = max(layers, default=-1) + 1 if total is None else total
    if (
        layers != list(range(end - len(layers), end))
        or len(layers) not in ALLOWED_LAYERS
        or stated not in (None, layers)
    ):
        raise CheckpointError(
            f"{path}: adapters on layers {layers} of {total}, config.yaml says {stated}; allowed: the last "
            f"{', '.join(map(str, ALLOWED_LAYERS))} layers of the target, and the same in both; name the target it was "
            "trained on"
        )
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    check_adapter_shapes(path, shapes, layers, rank, target["hidden_size"])
    return Adapters(layers, rank, alpha, module_names(tensors), tensors)
