"""The sums of an MtPC checkpoint in our order, with the biases of an HMM, whatever they are called."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.convert.tensors import Tensors, refuse_names
from vllm_mtpc.errors import CheckpointError

Shape = tuple[int, int, int]  # folds, outputs, inputs
_OWNER = re.compile(r"mt_head\._sum_weights_heads\.(\d+)\.")
_NUMBER = re.compile(r"(?<=[._])\d+(?=[._]|$)")


def _sum_shapes(path: Path, circuit: str, n: int, r: int) -> list[Shape]:
    """The sums of a circuit in their order, from the leaves to the root."""
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


def sum_tensors(
    path: Path, circuit: str, fold: list[int], r: int, found: Tensors, needs_bias: bool
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """root_weight, inner_weight and inner_bias as far as the circuit has them; names of biases by ours.

    `fold` is that of the leaves by position. Raises CheckpointError for another circuit, and for tensors not known.
    """
    n = len(fold)
    shapes = _sum_shapes(path, circuit, n, r)
    _check_wiring(path, circuit, fold, found.wiring)
    width = found.leaf.shape[3]
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
    tensors = {"root_weight": found.sums[len(shapes) - 1][0, 0]}
    order = list(range(len(shapes) - 1))
    if circuit == "hmm":
        order.reverse()
    if not order:
        return tensors, {}
    biases = _biases(path, shapes, found.unknown)
    _check_biases(path, biases, found.unknown, len(order), needs_bias)
    tensors["inner_weight"] = torch.cat([found.sums[k] for k in order])
    if biases:
        tensors["inner_bias"] = torch.cat([found.unknown[biases[k]].reshape(shapes[k]) for k in order])
    else:
        tensors["inner_bias"] = tensors["inner_weight"].new_zeros(tensors["inner_weight"].shape[:3])
    return tensors, {f"inner_bias[{at}]": biases[k] for at, k in enumerate(order) if k in biases}


def _biases(path: Path, shapes: list[Shape], unknown: Mapping[str, Tensor]) -> dict[int, str]:
    """Names of biases by the number of their sum head: they have its shape, and its number where several fit."""
    found: dict[int, str] = {}
    for name, value in unknown.items():
        size = [length for length in value.shape if length > 1]
        fitting = [k for k, shape in enumerate(shapes) if size == [length for length in shape if length > 1]]
        if owner := _OWNER.match(name) or (len(fitting) > 1 and _last_number(name)):
            fitting = [k for k in fitting if k == int(owner[1] if owner.re is _OWNER else owner[0])]
        if not fitting or not value.is_floating_point():
            refuse_names(path, [f"{name} {tuple(value.shape)}"])
        if len(fitting) > 1 or fitting[0] in found:
            other = f" as {found[fitting[0]]} does" if fitting[0] in found else ""
            raise CheckpointError(
                f"{path}: {name} {tuple(value.shape)} fits sum heads {', '.join(map(str, fitting))}{other}; it is not "
                "known which it belongs to; name it ..._K with the number K of its head, and convert again"
            )
        found[fitting[0]] = name
    return found


def _last_number(name: str) -> re.Match[str] | None:
    return next(reversed(list(_NUMBER.finditer(name))), None)


def _check_biases(path: Path, biases: dict[int, str], unknown: Mapping[str, Tensor], inner: int, needed: bool) -> None:
    """Raise CheckpointError unless all sums below the root have biases or none; drops the root's if it says nothing."""
    if (name := biases.pop(inner, None)) is not None:
        value = unknown[name].flatten()
        if bool((value != value[0]).any()):  # equal ones leave a softmax as it is
            raise CheckpointError(
                f"{path}: {name} is a bias of the root, which heads here do not have; allowed: equal values; train it "
                "without"
            )
    if biases and (missing := sorted(set(range(inner)) - biases.keys())):
        raise CheckpointError(
            f"{path}: sum heads {', '.join(map(str, sorted(biases)))} have a bias ({', '.join(biases.values())}), but "
            f"{', '.join(map(str, missing))} have none; copy the checkpoint again"
        )
    if needed and not biases:
        raise CheckpointError(
            f"{path}: config.yaml says init_hmm_identity, but no sum head has a bias, so what was added is not known; "
            "set mt_head.hyperparameters.init_hmm_identity to false there if nothing was"
        )
