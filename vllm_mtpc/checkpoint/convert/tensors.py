"""The tensors of an MtPC checkpoint, sorted by what their names say, and its sums in our order.

A name that says nothing is refused, but for the biases of an HMM, which are known by their shapes whatever their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
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
_OWNER = re.compile(r"mt_head\._sum_weights_heads\.(\d+)\.")
_NUMBER = re.compile(r"(?<=[._])\d+(?=[._]|$)")
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
    found, foreign = Tensors(named.get(LEAF), {}, named.get(_SCOPE), {}, {}, {}, []), []
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
    for name, value in {LEAF: found.leaf, **{f"sum head {k}": value for k, value in found.sums.items()}}.items():
        if value is None:
            raise CheckpointError(f"{path}: has no {name}; name a checkpoint of an MtPC head with a linear expander")
        if value.dim() != 4 or not value.is_floating_point():
            raise CheckpointError(
                f"{path}: {name} is {value.dtype} {tuple(value.shape)}; expected: float, 4 dimensions; copy it again"
            )
    return found


def refuse_names(path: Path, names: list[str]) -> None:
    """Raise CheckpointError for tensors that no head made by MtPC's code with linear expanders has."""
    if names:
        raise CheckpointError(
            f"{path}: unknown tensor(s): {', '.join(sorted(names))}; known: {LEAF}, mt_head._sum_weights_heads.K.head."
            "proj, biases of an HMM's sums, adapters (lora_A, lora_B); convert a head of these alone"
        )


def sum_tensors(
    path: Path, circuit: str, fold: list[int], r: int, found: Tensors, needs_bias: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """root_weight, inner_weight and inner_bias as far as the circuit has them; names of biases by ours.

    `fold` is that of the leaves by position. Raises CheckpointError for another circuit, and for tensors not known.
    """
    n, width = len(fold), found.leaf.shape[3]
    shapes = _sum_shapes(path, circuit, n, r)
    _check_wiring(path, circuit, fold, found.wiring)
    given = {k: tuple(value.shape) for k, value in sorted(found.sums.items())}
    wanted = {k: (*shape, width) for k, shape in enumerate(shapes)}
    if given != wanted and not (circuit == "ff" and given == {0: (1, 1, 1, width)}):  # a softmax over one input is 1
        raise CheckpointError(
            f"{path}: sum heads of shapes {given}, expected {wanted} for {circuit}, n={n}, r={r}; name the checkpoint "
            "that its config.yaml belongs to"
        )
    if circuit != "hmm":
        refuse_names(path, list(found.unknown))
    if not shapes:
        return {}, {}
    inner = len(shapes) - 1
    tensors = {"root_weight": found.sums[inner][0, 0]}
    if not inner:
        return tensors, {}
    order = list(range(inner))[:: -1 if circuit == "hmm" else 1]
    biases = _biases(path, shapes, found.unknown, needs_bias)
    weight = tensors["inner_weight"] = torch.cat([found.sums[k] for k in order])
    if biases:
        tensors["inner_bias"] = torch.cat([found.unknown[biases[k]].reshape(shapes[k]) for k in order])
    else:
        tensors["inner_bias"] = weight.new_zeros(weight.shape[:3])
    return tensors, {f"inner_bias[{at}]": biases[k] for at, k in enumerate(order) if k in biases}


def _sum_shapes(path: Path, circuit: str, n: int, r: int) -> list[tuple[int, int, int]]:
    """Folds, outputs and inputs of a circuit's sums in their order, from the leaves to the root."""
    if circuit == "ff":
        return []
    root = (1, 1, r)
    if circuit == "cp":
        return [root]
    if circuit == "hmm":  # the deepest one leads to the last token
        return [(1, r, r)] * (n - 1) + [root]
    if n & (n - 1):
        raise CheckpointError(
            f"{path}: btree over {n} tokens; allowed: 2, 4, 8, ... tokens, of others the file does not say which fold "
            "is which region; train such a head here"
        )
    return [(n >> height, r, r) for height in range(1, n.bit_length() - 1)] + [root]


def _check_wiring(path: Path, circuit: str, fold: list[int], wiring: Mapping[int, Tensor]) -> None:
    """Raise CheckpointError where layers are known to read other folds than the circuit says; `fold` by position."""
    n, expected = len(fold), {}
    if circuit == "hmm":
        expected[1] = torch.tensor([[fold[-1]]])
        expected |= {2 * k: torch.tensor([[0, 1 + fold[n - 1 - k]]]) for k in range(1, n)}
    if circuit == "btree":  # neighbours, of the leaves as of the regions above them
        expected[1] = torch.tensor(fold).view(-1, 2)
        expected |= {2 * k + 1: torch.arange(n >> k).view(-1, 2) for k in range(1, n.bit_length() - 1)}
    for layer, wanted in expected.items():
        if (given := wiring.get(layer)) is not None and given.tolist() != wanted.tolist():
            raise CheckpointError(
                f"{path}: layer {layer} of its {circuit} reads folds {given.tolist()}, expected {wanted.tolist()}: its "
                "tokens are in another order; convert a head whose circuit goes from left to right"
            )


def _biases(
    path: Path, shapes: list[tuple[int, int, int]], unknown: Mapping[str, Tensor], needed: bool
) -> dict[int, str]:
    """Names of biases by the number of their sum head: they have its shape, and its number where several fit.

    Raises CheckpointError unless all sums below the root have biases or none; the root's is dropped if it says nothing.
    """
    found: dict[int, str] = {}
    for name, value in unknown.items():
        size = [length for length in value.shape if length > 1]
        fitting = [k for k, shape in enumerate(shapes) if size == [length for length in shape if length > 1]]
        owner, numbers = _OWNER.match(name), _NUMBER.findall(name)
        if owner or (len(fitting) > 1 and numbers):
            fitting = [k for k in fitting if k == int(owner[1] if owner else numbers[-1])]
        if not fitting or not value.is_floating_point():
            refuse_names(path, [f"{name} {tuple(value.shape)}"])
        if len(fitting) > 1 or fitting[0] in found:
            other = f" as {found[fitting[0]]} does" if fitting[0] in found else ""
            raise CheckpointError(
                f"{path}: {name} {tuple(value.shape)} fits sum heads {', '.join(map(str, fitting))}{other}; it is not "
                "known which it belongs to; name it ..._K with the number K of its head, and convert again"
            )
        found[fitting[0]] = name
    inner = len(shapes) - 1
    if (root := found.pop(inner, None)) is not None:
        value = unknown[root].flatten()
        if bool((value != value[0]).any()):  # equal ones leave a softmax as it is
            raise CheckpointError(
                f"{path}: {name} is a bias of the root, which heads here do not have; allowed: equal values; train it "
                "without"
            )
    if found and (missing := sorted(set(range(inner)) - found.keys())):
        raise CheckpointError(
            f"{path}: sum heads {', '.join(map(str, sorted(found)))} have a bias ({', '.join(found.values())}), but "
            f"{', '.join(map(str, missing))} have none; copy the checkpoint again"
        )
    if needed and not found:
        raise CheckpointError(
            f"{path}: config.yaml says init_hmm_identity, but no sum head has a bias, so what was added is not known; "
            "set mt_head.hyperparameters.init_hmm_identity to false there if nothing was"
        )
    return found
