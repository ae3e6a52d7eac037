"""Convert a DFlash or DSpark drafter into a head of kind `backbone`: ff, with token_rank for DSpark's Markov head.

Tensors have the same names in speculators' layout and in the authors' (see drafter_config.py):

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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.convert.drafter_config import Drafter, read_drafter
from vllm_mtpc.checkpoint.convert.source import (
    MASK_FILE,
    ConvertOptions,
    load_tensors,
    narrowest_dtype,
    target_config,
)
from vllm_mtpc.checkpoint.load import check_shapes, shapes_of
from vllm_mtpc.checkpoint.locate import CONFIG_FILE, download, verifier_name
from vllm_mtpc.checkpoint.metadata import converted_card
from vllm_mtpc.checkpoint.save import save_head
from vllm_mtpc.checkpoint.shards import Shards, unequal_rows
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import read_json
from vllm_mtpc.heads import build_head

EMBEDDINGS, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
_LEFT_OUT = re.compile(r"confidence_head\..*|verifier_(norm|lm_head)\.weight")


def convert_drafter(options: ConvertOptions, label: str) -> str:
    """Write the head folder `options.out` of the drafter in the folder `options.ckpt`.

    Args:
        options: Of the conversion.
        label: Name of the drafter for provenance.

    Returns:
        A short description of the head.

    Raises:
        CheckpointError: The drafter has a setting or tensor that a backbone head cannot have.
        HeadConfigError: Its settings are not possible for a head.
    """
    folder, target = options.ckpt, target_config(options.target)
    given = read_drafter(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE), target)
    source = Shards(folder)
    target_shards = Shards(
        Path(options.target) if Path(options.target).is_dir() else download(options.target, "target")
    )
    tensors, left_out = _read_tensors(given, source, target["vocab_size"])
    left_out += _compare_with_target(given, source, target_shards, target)
    tensors["backbone.mask_embedding"], mask_source = _read_mask(given, source, target_shards)
    config = HeadConfig.create(
        circuit="ff",
        window=given.window,
        num_components=1,
        target=target,
        verifier=verifier_name(options.target, options.out),
        num_speculative_tokens=given.drafts,
        head="backbone",
        token_rank=given.markov_rank or None,
        backbone_head_dim=source.shape("layers.0.self_attn.q_norm.weight")[0],
        backbone_width=source.shape("layers.0.mlp.gate_proj.weight")[0],
        **given.options,
        **options.trained_sampling,
    )
    with torch.device("meta"):
        head = build_head(config)
    check_shapes(folder, shapes_of(tensors), shapes_of(head.state_dict()), f"{CONFIG_FILE} and the target")
    head.load_state_dict(tensors, assign=True)
    record = {"from": label, "layout": given.layout, "trained_on": given.trained_on, "mask": mask_source}
    provenance = {"converted": {**record, "left_out": left_out}}
    title = f"{'DSpark' if given.markov_rank else 'DFlash'} drafter as a backbone head: n={config.window}"
    dtype = narrowest_dtype(tensors.values())
    save_head(options.out, config, head, provenance, converted_card(config, title, label), dtype)
    return f"{config.circuit}, backbone, window {config.window}; left out: {', '.join(left_out) or 'nothing'}"


def _read_tensors(given: Drafter, source: Shards, vocab_size: int) -> tuple[dict[str, Tensor], list[str]]:
    """Return the head's tensors except the mask, and the names of tensors left out. Embeddings are not read."""
    layers = given.options["backbone_layers"]
    tensors, left_out, unknown = {}, [], []
    for name in sorted(source.files):
        layer = re.fullmatch(r"layers\.(\d+)\.[\w.]+", name)
        if (layer and int(layer[1]) < layers) or name in ("fc.weight", "hidden_norm.weight", "norm.weight"):
            tensors[f"backbone.{name}"] = source.read(name)
        elif _LEFT_OUT.fullmatch(name) or (name in MARKOV and not given.markov_rank):
            left_out.append(name)
        elif name not in (EMBEDDINGS, LM_HEAD, *MARKOV):
            unknown.append(name)
    if unknown:
        raise CheckpointError(
            f"{source.folder}: unknown tensor(s): {', '.join(unknown[:4])}; allowed: layers.0 to layers.{layers - 1}, "
            "fc, hidden_norm, norm, markov_head.markov_w1 and w2, confidence_head, embed_tokens, lm_head (over the "
            "target's whole vocabulary); convert another drafter"
        )
    if given.markov_rank:
        w1, w2 = (source.read(name) for name in MARKOV)
        tensors["token_source"] = w1[:vocab_size]  # it may have more rows than the target has ids
        tensors["token_target"] = w2.T[None].repeat(given.window - 1, 1, 1)
    return tensors, left_out


def _compare_with_target(given: Drafter, source: Shards, target_shards: Shards, target: dict[str, Any]) -> list[str]:
    """Return which of embeddings and lm_head the drafter has. Raises CheckpointError if one is not the target's.

    The mask's row may differ: it is read from the drafter.
    """
    equal = []
    for name in (EMBEDDINGS, LM_HEAD):
        if name not in source.files:
            continue
        other, size = _target_name(target_shards, name, target), (target["vocab_size"], target["hidden_size"])
        shapes = source.shape(name), target_shards.shape(other)
        # rows after the vocabulary are padding
        if any(len(shape) != 2 or shape[0] < size[0] or shape[1] != size[1] for shape in shapes):
            raise CheckpointError(
                f"{source.folder}: {name} is {shapes[0]}, the target's {shapes[1]}; allowed: {size}; name the target "
                "it was trained on"
            )
        differing = unequal_rows(source, name, target_shards, other, size[0])
        if name == EMBEDDINGS and given.mask_token_id in differing:
            differing.remove(given.mask_token_id)
        if differing:
            raise CheckpointError(
                f"{source.folder}: {name} is not the target's: {len(differing)} of {size[0]} rows differ, row "
                f"{differing[0]} first; name the target it was trained on, or convert a drafter that did not train "
                "its embeddings and lm_head"
            )
        equal.append(f"{name} (the target's)")
    return equal


def _target_name(target_shards: Shards, name: str, target: dict[str, Any]) -> str:
    """Return the target's name of its embeddings or lm_head."""
    found = target_shards.find_suffix(name)
    if found is None and name == LM_HEAD and target.get("tie_word_embeddings", True):
        found = target_shards.find_suffix(EMBEDDINGS)
    if found is None:
        raise CheckpointError(f"{target_shards.folder}: has no single {name}; name the target it was trained on")
    return found


def _read_mask(given: Drafter, source: Shards, target_shards: Shards) -> tuple[Tensor, str]:
    """Return the input of the first layer for a mask, [D], and its source."""
    number, file = given.mask_token_id, source.folder / MASK_FILE
    if file.is_file():
        state = load_tensors(file)
        if not isinstance(state, dict):
            state = {"embedding": state}
        value = state.get("embedding")
        if state.get("mask_token_id", number) != number or not isinstance(value, Tensor):
            raise CheckpointError(f"{file}: expected: the embedding of mask_token_id={number}; copy the drafter again")
        return value.reshape(-1), MASK_FILE
    is_own = EMBEDDINGS in source.files
    place, name = (source, EMBEDDINGS) if is_own else (target_shards, target_shards.find_suffix(EMBEDDINGS))
    rows = place.shape(name)[0] if name else 0
    if name is None or number >= rows:
        raise CheckpointError(
            f"{source.folder}: mask_token_id={number}, but the embeddings of {place.folder} have {rows} rows; name the "
            "target it was trained on"
        )
    owner = "its own" if is_own else "the target's"
    return place.read(name, number, number + 1)[0], f"row {number} of {owner} embeddings"
