"""The tensors of an MtPC checkpoint, sorted by what their names say; a name that says nothing is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import check_lengths

LEAF = "mt_head._categorical_log_probs_heads.0.head.proj"
_SUM = re.compile(r"mt_head\._sum_weights_heads\.(\d+)\.head\.proj")
_SCOPE = "circuit._circuit._nodes.0._scope_idx"
_WIRING = re.compile(r"circuit\._circuit\._address_book\._in_fold_idx_(\d+)_0")
# Of training, or constants of the circuit.
_UNUSED = ("_exp_gamma_weights", "circuit._autoregressive_mar_mask", "circuit._univariate_mar_mask")
_WRAPPERS = re.compile(r"(?:module\.|_orig_mod\.)*")  # what DDP and torch.compile put in front
_TARGET = "lm."
_TARGET_OWN = ("lora_", "modules_to_save")  # below _TARGET, but trained: not the target's weights


class Tensors(NamedTuple):
    """What a checkpoint holds; keys with the value None (weights of the target that were not trained) are gone."""

    leaf: Tensor  # [n, r, V, D], by fold
    sums: dict[int, Tensor]  # [F, out, in, D] by their number
    scope: Tensor | None  # [n, 1] int64, position of each fold of the leaves
    wiring: dict[int, Tensor]  # [F, inputs] int64 by layer
    lora: dict[str, Tensor]  # below the language model, by their names there
    unknown: dict[str, Tensor]  # of the head: biases of an HMM, whatever their names, or nothing we know
    skipped: list[str]  # weights of the target


def sort_tensors(path: Path, state: Any) -> Tensors:
    """Sort a `model_state_dict`; raises CheckpointError for what is not in the layout."""
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path}: its 'model_state_dict' is none; name a checkpoint of MtPC's code (model@STEP.pt)"
        )
    named = {_WRAPPERS.sub("", str(name), count=1): value for name, value in state.items() if value is not None}
    check_lengths(path, named)
    found = Tensors(None, {}, None, {}, {}, {}, [])
    foreign = []
    for name, value in named.items():
        if not isinstance(value, Tensor):
            foreign.append(name)
        elif match := _SUM.fullmatch(name):
            found.sums[int(match[1])] = value
        elif match := _WIRING.fullmatch(name):
            found.wiring[int(match[1])] = value
        elif name.startswith(_TARGET):
            if any(part in name for part in _TARGET_OWN):
                found.lora[name.removeprefix(_TARGET)] = value
            else:
                found.skipped.append(name)
        elif name.startswith("mt_head.") and name != LEAF:
            found.unknown[name] = value
        elif name not in (LEAF, _SCOPE, *_UNUSED):
            foreign.append(name)
    refuse_names(path, foreign)
    leaf, scope = named.get(LEAF), named.get(_SCOPE)
    _check_kinds(path, {LEAF: leaf, **{f"sum head {k}": value for k, value in found.sums.items()}})
    return found._replace(leaf=leaf, scope=scope)


def refuse_names(path: Path, names: list[str]) -> None:
    """Raise CheckpointError for tensors that no head made by MtPC's code with linear expanders has."""
    if names:
        raise CheckpointError(
            f"{path}: unknown tensor(s): {', '.join(sorted(names))}; known: {LEAF}, mt_head._sum_weights_heads.K.head."
            "proj, biases of an HMM's sums, adapters (lora_A, lora_B); convert a head of these alone"
        )


def _check_kinds(path: Path, tensors: Mapping[str, Tensor | None]) -> None:
    for name, value in tensors.items():
        if value is None:
            raise CheckpointError(f"{path}: has no {name}; name a checkpoint of an MtPC head with a linear expander")
        if value.dim() != 4 or not value.is_floating_point():
            raise CheckpointError(
                f"{path}: {name} is {value.dtype} {tuple(value.shape)}; expected: float, 4 dimensions; copy it again"
            )
