"""Read the tensors of an MtPC checkpoint and order its sums as heads here do.

An unknown tensor is an error. The exception are biases of an HMM's sums, whose name is not published: they are matched
by their shapes, and by the number in their names if several sums have that shape.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
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
_WRAPPERS = re.compile(r"(?:module\.|_orig_mod\.)*")  # prefixes of DDP and torch.compile
_OWNER = re.compile(r"mt_head\._sum_weights_heads\.(\d+)\.")
_NUMBER = re.compile(r"(?<=[._])\d+(?=[._]|$)")
_TARGET = "lm."
_TRAINED = ("lora_", "modules_to_save")  # below _TARGET, but not weights of the target


class Tensors(NamedTuple):
    """The tensors of a checkpoint without None, the value of the target's weights."""

    leaf: Tensor  # [n, r, V, D], by fold
    sums: dict[int, Tensor]  # [F, out, in, D] by number
    scope: Tensor | None  # [n, 1] int64, position of each fold of the leaves
    wiring: dict[int, Tensor]  # [F, inputs] int64 by layer
    lora: dict[str, Tensor]  # by their names in the language model
    unknown: dict[str, Tensor]  # of the head: biases of an HMM, or tensors that are not supported
    skipped: list[str]  # names of weights of the target


def sort_tensors(path: Path, state: Any) -> Tensors:
    """Sort the tensors of a `model_state_dict` by their names.

    Raises:
        CheckpointError: A name is not known, or the leaves or sums are not floats of 4 dimensions.
    """
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path}: its 'model_state_dict' is not a dict; name a checkpoint of MtPC's code (model@STEP.pt)"
        )
    named = {_WRAPPERS.sub("", str(name), count=1): value for name, value in state.items() if value is not None}
    check_lengths(path, named)
    if LEAF not in named:
        raise CheckpointError(f"{path}: has no {LEAF}; name a checkpoint of an MtPC head with a linear expander")
    found, foreign = Tensors(named[LEAF], {}, named.get(_SCOPE), {}, {}, {}, []), []
    for name, value in named.items():
        if not isinstance(value, Tensor):
            foreign.append(name)
        elif match := _SUM.fullmatch(name):
            found.sums[int(match[1])] = value
        elif match := _WIRING.fullmatch(name):
            found.wiring[int(match[1])] = value
        elif name.startswith(_TARGET) and any(part in name for part in _TRAINED):
            found.lora[name.removeprefix(_TARGET)] = value
        elif name.startswith(_TARGET):
            found.skipped.append(name)
        elif name.startswith("mt_head.") and name != LEAF:
            found.unknown[name] = value
        elif name not in (LEAF, _SCOPE, *_UNUSED):
            foreign.append(name)
    check_no_unknown(path, foreign)
    for name, value in {LEAF: found.leaf, **{f"sum head {k}": value for k, value in found.sums.items()}}.items():
        if value.dim() != 4 or not value.is_floating_point():
            raise CheckpointError(
                f"{path}: {name} is {value.dtype} {tuple(value.shape)}; expected: float, 4 dimensions; copy it again"
            )
    return found


def check_no_unknown(path: Path, names: Collection[str]) -> None:
    """Raise CheckpointError if `names` has names of unknown tensors."""
    if names:
        raise CheckpointError(
            f"{path}: unknown tensor(s): {', '.join(sorted(names))}; allowed: {LEAF}, mt_head._sum_weights_heads.K."
            "head.proj, biases of an HMM's sums, adapters (lora_A, lora_B); convert another head"
        )


def read_positions(path: Path, circuit: str, n: int, scope: Tensor | None) -> list[int]:
    """Return the token position of each fold of the leaves; raises CheckpointError unless each occurs once."""
    if scope is None:
        return list(range(n)) if circuit != "hmm" else list(reversed(range(n)))
    position = scope.flatten().tolist()
    if sorted(position) != list(range(n)):
        raise CheckpointError(f"{path}: _scope_idx = {position}; allowed: each of 0 to {n - 1} once; copy it again")
    return position


def order_sums(
    path: Path, circuit: str, fold: list[int], r: int, found: Tensors, needs_bias: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Order the sums of a checkpoint as a head here has them.

    Args:
        path: Named in errors.
        circuit: "ff", "cp", "hmm" or "btree".
        fold: The fold of the leaf at each position.
        r: Number of components.
        found: The tensors of the checkpoint.
        needs_bias: Whether an HMM must have biases.

    Returns:
        root_weight [r, D], inner_weight [F, r, r, D] and inner_bias [F, r, r], as far as the circuit has them; and
        the checkpoint's name of each bias.

    Raises:
        CheckpointError: The tensors are of another circuit, or not known.
    """
    n, width = len(fold), found.leaf.shape[3]
    shapes = _sum_shapes(path, circuit, n, r)
    _check_wiring(path, circuit, fold, found.wiring)
    given = {k: tuple(value.shape) for k, value in sorted(found.sums.items())}
    wanted = {k: (*shape, width) for k, shape in enumerate(shapes)}
    if given != wanted and not (circuit == "ff" and given == {0: (1, 1, 1, width)}):  # a softmax over one input is 1
        raise CheckpointError(
            f"{path}: sum heads of shapes {given}, expected {wanted} for {circuit}, n={n}, r={r}; name the checkpoint "
            "of this config.yaml"
        )
    if circuit != "hmm":
        check_no_unknown(path, found.unknown)
    if not shapes:
        return {}, {}
    inner = len(shapes) - 1
    tensors = {"root_weight": found.sums[inner][0, 0]}
    if not inner:
        return tensors, {}
    order = range(inner)[::-1] if circuit == "hmm" else range(inner)
    biases = _match_biases(path, shapes, found.unknown)
    if needs_bias and not biases:
        raise CheckpointError(
            f"{path}: config.yaml has init_hmm_identity, but no sum head has a bias; set "
            "mt_head.hyperparameters.init_hmm_identity to false if the head was trained without"
        )
    weight = tensors["inner_weight"] = torch.cat([found.sums[k] for k in order])
    tensors["inner_bias"] = weight.new_zeros(weight.shape[:3])
    if biases:
        tensors["inner_bias"] = torch.cat([found.unknown[biases[k]].reshape(shapes[k]) for k in order])
    return tensors, {f"inner_bias[{at}]": biases[k] for at, k in enumerate(order) if biases}


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


def _check_wiring(path: Path, circuit: str, fold: list[int], wiring: Mapping[int, Tensor]) -> None:
    """Raise CheckpointError if a layer reads other folds than it does in a circuit from left to right."""
    n, expected = len(fold), {}
    if circuit == "hmm":
        expected = {1: [[fold[-1]]], **{2 * k: [[0, 1 + fold[n - 1 - k]]] for k in range(1, n)}}
    if circuit == "btree":  # neighbours, both leaves and regions
        expected[1] = torch.tensor(fold).view(-1, 2).tolist()
        expected |= {2 * k + 1: torch.arange(n >> k).view(-1, 2).tolist() for k in range(1, n.bit_length() - 1)}
    for layer, wanted in expected.items():
        if (given := wiring.get(layer)) is not None and given.tolist() != wanted:
            raise CheckpointError(
                f"{path}: layer {layer} of its {circuit} reads folds {given.tolist()}, expected {wanted}: its tokens "
                "are in another order; convert a head whose circuit goes from left to right"
            )


def _match_biases(path: Path, shapes: list[tuple[int, int, int]], unknown: Mapping[str, Tensor]) -> dict[int, str]:
    """Return the name of the bias of each sum head below the root; empty if none has one."""
    found: dict[int, str] = {}
    for name, value in unknown.items():
        size = [length for length in value.shape if length > 1]
        fitting = [k for k, shape in enumerate(shapes) if size == [length for length in shape if length > 1]]
        owner, numbers = _OWNER.match(name), _NUMBER.findall(name)
        if owner or (len(fitting) > 1 and numbers):
            fitting = [k for k in fitting if k == int(owner[1] if owner else numbers[-1])]
        if not fitting or not value.is_floating_point():
            check_no_unknown(path, [f"{name} {tuple(value.shape)}"])
        if len(fitting) > 1 or fitting[0] in found:
            raise CheckpointError(
                f"{path}: {name} {tuple(value.shape)} fits sum heads {', '.join(map(str, fitting))}, and is not the "
                "only bias that does; rename it to ..._K with the number K of its head, and convert again"
            )
        found[fitting[0]] = name
    inner = len(shapes) - 1
    if (root := found.pop(inner, None)) is not None and bool((unknown[root] != unknown[root].flatten()[0]).any()):
        raise CheckpointError(f"{path}: {root} is a bias of the root, which heads here do not have; train it without")
    if found and (missing := sorted(set(range(inner)) - found.keys())):
        raise CheckpointError(
            f"{path}: sum heads {', '.join(map(str, sorted(found)))} have a bias ({', '.join(found.values())}), but "
            f"{', '.join(map(str, missing))} have none; copy the checkpoint again"
        )
    return found
