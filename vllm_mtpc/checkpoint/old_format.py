"""Heads of the releases up to 0.3 (format 2), in which a kind of head fixed trunk, leaves and their options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import read_json
from vllm_mtpc.heads.adapters import ADAPTER_CONFIG_FILE

VERSION = 2
PARTS = {"linear": ("none", "own"), "shared": ("none", "lm_head"), "backbone": ("backbone", "lm_head")}
PARTS["hosted"] = ("drafter", "lm_head")
BACKBONE = ("layers", "heads", "kv_heads", "head_dim", "width", "theta", "eps")  # with the prefix backbone_
AUX = ("aux_hidden_state_layer_ids", "sample_from_anchor")
GONE = ("head", "lora_layers", "drafter", "hidden_state_layer", "x1_from", "num_components", "circuit")
RANKS = ("token_rank", "component_rank", "expander_rank")
OF_THE_HEAD = ("root_", "inner_", "d2t", "t2d")  # today's head may have no others
OF_POSITIONS = ("component_in", "component_out")  # had a row for x_1, which these trunks have seen


def upgrade_config(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config of a head of format 2 in today's form, others as they are; CheckpointError: an unknown head."""
    if values.get("format_version") != VERSION or values.get("speculators_model_type") != "mtpc":
        return values
    if (kind := values.get("head")) not in PARTS:
        raise CheckpointError(
            f"{folder}: head {kind!r} of an old release: allowed are {', '.join(PARTS)}; train it again"
        )
    trunk_kind, leaves_kind = PARTS[kind]
    trunk: dict[str, Any] = {"kind": trunk_kind}
    if trunk_kind == "backbone":
        trunk |= {name: values.get(f"backbone_{name}") for name in BACKBONE} | {name: values.get(name) for name in AUX}
    elif trunk_kind == "drafter":
        trunk |= values.get("drafter") or {}
    elif layers := values.get("lora_layers"):
        adapters = read_json(folder / ADAPTER_CONFIG_FILE)
        rank, alpha = adapters.get("r"), float(adapters.get("lora_alpha") or 0)
        trunk = {"kind": "lora", "layers": layers, "rank": rank, "alpha": alpha}
    leaves: dict[str, Any] = {"kind": leaves_kind, "token_rank": values.get("token_rank", 0)}
    if leaves_kind == "lm_head":
        leaves |= {name: values.get(name, 0) for name in RANKS}
    circuit = {"kind": values.get("circuit"), "num_components": values.get("num_components")}
    old = {*GONE, *RANKS, *AUX, *(f"backbone_{name}" for name in BACKBONE)}
    kept = {name: value for name, value in values.items() if name not in old}
    return kept | {"format_version": VERSION + 1, "trunk": trunk, "leaves": leaves, "circuit": circuit}


def upgrade_tensors(tensors: Mapping[str, Tensor], sees_first: bool) -> dict[str, Tensor]:
    """Return the tensors of a head under today's names; those that have them as they are."""
    if any(name.startswith(("leaves.", "trunk.")) for name in tensors):
        return dict(tensors)
    found = {}
    for name, value in tensors.items():
        part = "trunk." if name.startswith("backbone.") else "" if name.startswith(OF_THE_HEAD) else "leaves."
        found[part + name] = value[1:] if sees_first and name in OF_POSITIONS else value
    return found
