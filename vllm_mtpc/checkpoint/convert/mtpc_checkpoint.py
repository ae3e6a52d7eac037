"""Convert an MtPC head of the paper's authors.

A checkpoint is `model@STEP.pt`, a pickled dict whose `model_state_dict` has the head, its adapters, and None for every
weight of the target, and a `config.yaml` next to it. Tensors, n tokens, r components:

    mt_head._categorical_log_probs_heads.0.head.proj    [n, r, V, D]      leaves by fold
    mt_head._sum_weights_heads.K.head.proj              [F, out, in, D]   K = 0, 1, ... from the leaves to the root
    mt_head._sum_weights_heads.K.head.bias              [1, r, r]         of an HMM's sums below the root, all or none
    circuit._circuit._nodes.0._scope_idx                [n, 1]            token position of each fold of the leaves

A head here has leaves by position, sums from the leaves to the root, and those of an HMM by position. The distribution
does not change: logits are the same linear maps of the same hidden state, normalised over the same dimension. Unknown
tensors and keys are errors. The circuit must go from left to right, as the authors' do.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from vllm_mtpc.checkpoint.convert import source
from vllm_mtpc.checkpoint.convert.source import SETTINGS_FILE, ConvertOptions
from vllm_mtpc.checkpoint.load import check_adapter_shapes, check_shapes, check_values, module_names, shapes_of
from vllm_mtpc.checkpoint.save import save_converted
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import CheckpointError, Model, printable, validate
from vllm_mtpc.files import read_yaml
from vllm_mtpc.heads.adapters import Adapters
from vllm_mtpc.heads.sections import Section
from vllm_mtpc.heads.trunk.lora import ALLOWED_LAYERS

LEAF = "mt_head._categorical_log_probs_heads.0.head.proj"
SUM, BIAS = "mt_head._sum_weights_heads.{}.head.proj", "mt_head._sum_weights_heads.{}.head.bias"
SCOPE = "circuit._circuit._nodes.0._scope_idx"
# Of training, or constants of the circuit.
_UNUSED = re.compile(r"_exp_gamma_weights|circuit\._(\w+_mar_mask|circuit\._address_book\._in_fold_idx_\d+_0)")
_WRAPPERS = re.compile(r"(?:module\.|_orig_mod\.)*")  # prefixes of DDP and torch.compile
_ADAPTER = re.compile(r"base_model\.model\..*\.lora_[AB](?=(\.default)?\.weight$)")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_REFERENCE = re.compile(r"\$\{([\w.-]+)\}")
MAX_REFERENCES = 8  # from one to the next
# Keys of config.yaml about the start of training, or about which tensors there are.
IGNORED = {"_target_", "vocab_size", "contextual_hmm_weights", "share_sum_weights", "expander_hidden_size", "n_embd"}
IGNORED |= {"expander_n_layer", "expander_use_skip", "freeze_vocab_unembedding", "transformer_n_head"}
IGNORED |= {"lora_dropout", "target_modules"}


class CircuitSettings(Section):
    """circuit.model. Other kinds (random-btree) have no order of positions."""

    kind: Literal["fully-factorized", "cp", "hmm", "btree"] = "cp"
    n_token: int = Field(ge=1)
    n_component: int = Field(ge=1)
    n_repetition: int = Field(1, ge=1, le=1)

    @property
    def name(self) -> str:
        """The circuit's name here."""
        is_ff = self.kind == "fully-factorized" or (self.kind == "cp" and self.n_component == 1)
        return "ff" if is_ff else self.kind


class HeadSettings(Section):
    """mt_head.hyperparameters."""

    type: Literal["evabyte"]
    expander_type: Literal["linear"] = "linear"
    transformer_n_layer: int = Field(0, ge=0, le=0)
    init_hmm_identity: bool = False


class AdapterSettings(Section):
    """adaptor.hyperparameters."""

    r: int = Field(ge=1)
    lora_alpha: float = Field(gt=0)
    layers_to_transform: list[int] | None = None


def convert_mtpc(options: ConvertOptions, label: str) -> str:
    """Convert the MtPC checkpoint `options.ckpt` as `convert`; `label` is its name for provenance."""
    path, target = options.ckpt, source.target_config(options.target)
    content, file = source.load_tensors(path), path.with_name(SETTINGS_FILE)
    state = content.get("model_state_dict") if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: has no dict 'model_state_dict'; name a model@STEP.pt of MtPC's code")
    if not file.exists():
        raise CheckpointError(f"{file.parent} has no {file.name}; copy it from the source of the checkpoint")
    settings = read_yaml(file)
    circuit = read_section(file, settings, "circuit.model", CircuitSettings)
    expander = read_section(file, settings, "mt_head.hyperparameters", HeadSettings)
    if circuit is None or expander is None:
        raise CheckpointError(f"{file}: has no circuit.model or no mt_head.hyperparameters; copy it again")
    given, lora = sort_tensors(path, state)
    tensors = order_tensors(path, circuit, expander, given, target)
    stated = read_section(file, settings, "adaptor.hyperparameters", AdapterSettings)
    trunk: dict[str, Any] = {"kind": "none"}
    if adapters := _read_adapters(path, lora, stated, target):
        trunk = {"kind": "lora", "layers": adapters.num_layers, "rank": adapters.rank, "alpha": float(adapters.alpha)}
    n, r = circuit.n_token, circuit.n_component
    parts: dict[str, Any] = {"circuit": circuit.name, "num_components": r, "trunk": trunk, "leaves": {"kind": "own"}}
    config = HeadConfig.create(window=n, target=target, verifier=options.verifier, **parts)
    trained_on = resolve(settings, "${lm.model.from_huggingface}")
    record: dict[str, Any] = {"from": label, "trained_on": printable(str(trained_on), 300)}
    if isinstance(step := content.get("global_step"), int):
        record["global_step"] = step
    save_converted(options.out, config, tensors, f"MtPC head: {circuit.name}, n={n}, r={r}", record, adapters)
    layers = f", {config.lora_layers} draft layers" if config.lora_layers else ""
    return f"{circuit.name}, window {n}, {r} components{layers}"


def resolve(settings: Mapping[str, Any], value: Any) -> Any:
    """Return `value`, or the value at the place of `settings` that it names (`${a.b.c}`), None if there is none."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(value, str) or (match := _REFERENCE.fullmatch(value)) is None:
            return value
        value = settings
        for key in match[1].split("."):
            value = value.get(key) if isinstance(value, dict) else None
    return None


def read_section(file: Path, settings: Mapping[str, Any], path: str, model: type[Model]) -> Model | None:
    """Return the mapping at `path` without nulls as `model`, None if there is none; raises CheckpointError."""
    node = resolve(settings, f"${{{path}}}")
    if node is None:
        return None
    if isinstance(node, dict):
        values = {str(key): resolve(settings, value) for key, value in node.items()}
        node = {key: value for key, value in values.items() if value is not None and key not in IGNORED}
    return validate(model, node, CheckpointError, f"{file}: {path}: ", "; convert another head")


def sort_tensors(path: Path, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of the head by their names without wrappers' prefixes, and the adapters.

    Weights of the target are left out with a warning. Raises CheckpointError for what is no tensor.
    """
    named = {_WRAPPERS.sub("", str(name), count=1): value for name, value in state.items() if value is not None}
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(f"{path}: {name} is a {type(value).__name__}, not a tensor; convert another head")
    target = {name for name in named if name.startswith("lm.")}
    adapted = {name for name in target if "lora_" in name or "modules_to_save" in name}
    if skipped := sorted(target - adapted):
        names = printable(", ".join(skipped), 300)
        print(f"warning: {path}: weights of the target are left out: {names}", file=sys.stderr)
    head = {name: value for name, value in named.items() if name not in target and not _UNUSED.fullmatch(name)}
    return head, {name: named[name] for name in adapted}


def order_tensors(
    path: Path, circuit: CircuitSettings, expander: HeadSettings, given: Mapping[str, Tensor], target: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return a head's tensors, as far as the circuit has them, of those `given` by a checkpoint.

    Raises CheckpointError for tensors of another circuit or target.
    """
    n, r, width = circuit.n_token, circuit.n_component, target["hidden_size"]
    sums, is_hmm = _sum_shapes(path, circuit.name, n, r), circuit.name == "hmm"
    order = range(len(sums) - 1)[::-1] if is_hmm else range(len(sums) - 1)  # the sums below the root
    has_bias = is_hmm and (expander.init_hmm_identity or not given.keys().isdisjoint(map(BIAS.format, order)))
    if circuit.name == "ff":  # a softmax over one input is 1
        given = {name: value for name, value in given.items() if name != SUM.format(0)}
    expected = {LEAF: (n, r, target["vocab_size"], width), SCOPE: (n, 1)}
    expected |= {SUM.format(k): (*shape, width) for k, shape in enumerate(sums)}
    expected |= {BIAS.format(k): sums[k] for k in order if has_bias}
    check_shapes(path, shapes_of(given), expected, f"{SETTINGS_FILE} and the target")
    position = given[SCOPE].flatten().tolist()
    if sorted(position) != list(range(n)):
        raise CheckpointError(f"{path}: _scope_idx = {position}; allowed: each of 0 to {n - 1} once; copy it again")
    values = {name: check_values(path, name, value) for name, value in given.items() if name != SCOPE}
    tensors = {"leaves.leaf_weight": values[LEAF][[position.index(k) for k in range(n)]]}
    if sums:
        tensors["root_weight"] = values[SUM.format(len(sums) - 1)][0, 0]
    if order:
        weight = tensors["inner_weight"] = torch.cat([values[SUM.format(k)] for k in order])
        biases = [values[BIAS.format(k)] for k in order if has_bias]
        tensors["inner_bias"] = torch.cat(biases) if biases else weight.new_zeros(weight.shape[:3])
    return tensors


def _sum_shapes(path: Path, circuit: str, n: int, r: int) -> list[tuple[int, int, int]]:
    """Return folds, outputs and inputs of a circuit's sums, from the leaves to the root."""
    root = (1, 1, r)
    if circuit in ("ff", "cp"):
        return [root] if circuit == "cp" else []
    if circuit == "hmm":  # the deepest one leads to the last token
        return [(1, r, r)] * (n - 1) + [root]
    if n & (n - 1):
        raise CheckpointError(
            f"{path}: btree over {n} tokens; allowed: 2, 4, 8, ... tokens, because the file does not name the regions "
            "of its folds; train such a head here"
        )
    return [(n >> height, r, r) for height in range(1, n.bit_length() - 1)] + [root]


def _read_adapters(
    path: Path, lora: Mapping[str, Tensor], given: AdapterSettings | None, target: Mapping[str, Any]
) -> Adapters | None:
    """Return the adapters of a checkpoint; raises CheckpointError if they are not of the target's last layers."""
    if given is None and not lora:
        return None
    if given is None or not lora:
        raise CheckpointError(
            f"{path}: has {len(lora)} adapter tensors, but {SETTINGS_FILE} has adaptor.hyperparameters = {given}; keep "
            f"a checkpoint and its own {SETTINGS_FILE} together"
        )
    tensors = {}
    for name, value in lora.items():
        if (match := _ADAPTER.search(name)) is None:
            raise CheckpointError(f"{path}: {name} is not supported; allowed: lora_A, lora_B of linear layers")
        tensors[f"{match[0]}.weight"] = value
    layers = sorted({int(match[1]) for match in map(_LAYER.search, tensors) if match})
    total, stated = target.get("num_hidden_layers"), given.layers_to_transform
    end = max(layers, default=-1) + 1 if total is None else total
    is_last = len(layers) in ALLOWED_LAYERS and layers == list(range(end - len(layers), end))
    if not is_last or stated not in (None, layers):
        raise CheckpointError(
            f"{path}: adapters on layers {layers} of {total}, {SETTINGS_FILE} has {stated}; allowed: the last "
            f"{', '.join(map(str, ALLOWED_LAYERS))} layers of the target, and the same in both; name the target it was "
            "trained on"
        )
    check_adapter_shapes(path, shapes_of(tensors), layers, given.r, target["hidden_size"])
    return Adapters(layers, given.r, given.lora_alpha, module_names(tensors), tensors)
