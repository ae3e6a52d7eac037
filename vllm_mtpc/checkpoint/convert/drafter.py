"""A DFlash or DSpark drafter as a head of kind `backbone`: FF, for DSpark with its Markov head as token_rank.

Tensors have the same names in speculators' layout and in the authors' (drafter_config.py says what their configs say):

    layers.*, fc, hidden_norm, norm      the same in the head, below `backbone.`
    markov_head.markov_w1 [V, R], w2     token_source, and token_target [n - 1, R, V]: one for all positions, repeated
    embed_tokens, lm_head                must equal the target's, which the head reads; left out
    mask_embedding.pt                    backbone.mask_embedding; without it row mask_token_id of the embeddings
    confidence_head.*                    left out: a circuit says its own acceptance
    verifier_norm, verifier_lm_head      the target's, left out

Drafts are theirs: the same layers over the same states, the same logits.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.convert.drafter_config import Drafter, read_drafter
from vllm_mtpc.checkpoint.convert.source import MASK_FILE, ConvertOptions, load, narrowest, target_config
from vllm_mtpc.checkpoint.locate import CONFIG_FILE, download, verifier_name
from vllm_mtpc.checkpoint.metadata import converted_card
from vllm_mtpc.checkpoint.save import save_head
from vllm_mtpc.checkpoint.shards import Shards, unequal_rows
from vllm_mtpc.config.mtpc import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import read_json
from vllm_mtpc.heads import build_head

EMBEDDINGS, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
_LEFT_OUT = re.compile(r"confidence_head\..*|verifier_(norm|lm_head)\.weight")
_GATES = re.compile(r"markov_head\.(gate|joint)_proj\..*")
_REDUCED = ("d2t", "t2d")


def convert_drafter(options: ConvertOptions, label: str) -> tuple[HeadConfig, str]:
    """Write the head folder `options.out` of the folder `options.ckpt`; returns its config and what was read and not.

    `label` is what provenance calls the folder. Raises CheckpointError or HeadConfigError.
    """
    folder, target = options.ckpt, target_config(options.target)
    given = read_drafter(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE), target)
    found = Shards(folder)
    tensors, left_out = _sort(folder, given, found, target["vocab_size"])
    theirs = Shards(Path(options.target) if Path(options.target).is_dir() else download(options.target, "target"))
    left_out += _check_own(given, found, theirs, target)
    mask, mask_from = _mask(given, found, theirs)
    tensors["backbone.mask_embedding"] = mask
    config = HeadConfig.create(
        circuit="ff",
        window=given.window,
        num_components=1,
        target=target,
        verifier=verifier_name(options.target, options.out),
        num_speculative_tokens=given.drafts,
        head="backbone",
        token_rank=given.markov_rank or None,
        backbone_head_dim=_size(folder, tensors, "backbone.layers.0.self_attn.q_norm.weight"),
        backbone_width=_size(folder, tensors, "backbone.layers.0.mlp.gate_proj.weight"),
        **given.options,
        **options.trained_sampling,
    )
    with torch.device("meta"):
        head = build_head(config)
    _check_shapes(folder, tensors, head.state_dict())
    head.load_state_dict(tensors, assign=True)
    record: dict[str, Any] = {"from": label, "layout": given.layout, "trained_on": given.trained_on, "mask": mask_from}
    record["left_out"] = left_out
    verifier = config.speculators_config.verifier.name_or_path
    about = f"Converted from `{label}` by `vllm-mtpc convert`; target `{verifier}`."
    title = f"{'DSpark' if given.markov_rank else 'DFlash'} drafter as a backbone head: n={config.window}"
    save_head(
        options.out, config, head, {"converted": record}, converted_card(config, title, about), narrowest(tensors)
    )
    return config, _report(config, given, len(tensors), mask_from, left_out)


def _report(config: HeadConfig, given: Drafter, read: int, mask_from: str, left_out: list[str]) -> str:
    options = given.options
    rank = f", token_rank {config.token_rank}" if config.token_rank else ""
    anchor = ", drafts from the anchor on" if options["sample_from_anchor"] else ""
    return (
        f"{config.circuit}, window {config.window}, draft layers: {options['backbone_layers']}, layers they read: "
        f"{', '.join(map(str, options['aux_hidden_state_layer_ids']))}{rank}{anchor}; read of {given.layout}: {read} "
        f"tensors, the mask from {mask_from}; left out: {', '.join(left_out) or 'nothing'}"
    )


def _sort(folder: Path, given: Drafter, found: Shards, vocab_size: int) -> tuple[dict[str, Tensor], list[str]]:
    """The head's tensors by our names, but for the mask; names of those left out. Embeddings and lm_head are not read.

    Raises CheckpointError for what a backbone head has no place for.
    """
    if reduced := [name for name in _REDUCED if name in found.files]:
        raise CheckpointError(
            f"{folder}: has {' and '.join(reduced)}: it drafts from some of the target's ids alone; allowed: drafters "
            "over all of them; convert one trained with the whole vocabulary"
        )
    layers = given.options["backbone_layers"]
    tensors, left_out, unknown = {}, [], []
    for name in sorted(found.files):
        layer = re.fullmatch(r"layers\.(\d+)\.[\w.]+", name)
        if (layer and int(layer[1]) < layers) or name in ("fc.weight", "hidden_norm.weight", "norm.weight"):
            tensors[f"backbone.{name}"] = found.read(name)
        elif _LEFT_OUT.fullmatch(name) or (name in MARKOV and not given.markov_rank):
            left_out.append(name)
        elif name not in (EMBEDDINGS, LM_HEAD, *MARKOV):
            unknown.append(name)
    if unknown:
        gates = "a Markov head of another type" if any(map(_GATES.fullmatch, unknown)) else "another drafter's"
        raise CheckpointError(
            f"{folder}: unknown tensor(s), {gates}: {', '.join(unknown[:4])}; known: layers.0 to layers.{layers - 1}, "
            "fc, hidden_norm, norm, markov_head.markov_w1 and w2, confidence_head, embed_tokens, lm_head; convert a "
            "drafter of these alone"
        )
    if given.markov_rank:
        source, target = (found.read(name) for name in MARKOV)
        tensors["token_source"] = source[:vocab_size]  # it may know ids that the target does not say
        tensors["token_target"] = target.T[None].repeat(given.window - 1, 1, 1)
    return tensors, left_out


def _check_own(given: Drafter, found: Shards, theirs: Shards, target: dict[str, Any]) -> list[str]:
    """Which of its own embeddings and lm_head equal the target's; raises CheckpointError for one that does not.

    The mask's row may be another: that one is read of the drafter's.
    """
    equal = []
    for name in (EMBEDDINGS, LM_HEAD):
        if name not in found.files:
            continue
        other, size = _of_target(theirs, name, target), (target["vocab_size"], target["hidden_size"])
        shapes = found.shape(name), theirs.shape(other)
        # rows behind the vocabulary are padding, in either
        if any(len(shape) != 2 or shape[0] < size[0] or shape[1] != size[1] for shape in shapes):
            raise CheckpointError(
                f"{found.folder}: {name} is {shapes[0]}, the target's {shapes[1]}; allowed: {size}, all ids of the "
                "target; name the target it was trained on"
            )
        differing = unequal_rows(found, name, theirs, other, size[0])
        if name == EMBEDDINGS and given.mask_token_id in differing:
            differing.remove(given.mask_token_id)
        if differing:
            raise CheckpointError(
                f"{found.folder}: {name} is not the target's: {len(differing)} of {size[0]} rows differ, row "
                f"{differing[0]} first; a head reads the target's own; name the target it was trained on, or convert "
                "a drafter whose embeddings and lm_head were left as they were"
            )
        equal.append(f"{name} (the target's)")
    return equal


def _of_target(theirs: Shards, name: str, target: dict[str, Any]) -> str:
    """What the target calls its embeddings or lm_head."""
    own = theirs.ending(name)
    if own is None and name == LM_HEAD and target.get("tie_word_embeddings", True):
        own = theirs.ending(EMBEDDINGS)
    if own is None:
        raise CheckpointError(
            f"{theirs.folder}: has no {name} of one language model, which the drafter reads; name the target it was "
            "trained on"
        )
    return own


def _mask(given: Drafter, found: Shards, theirs: Shards) -> tuple[Tensor, str]:
    """What enters the first layer for a mask, [D], and where it is from."""
    number, file = given.mask_token_id, found.folder / MASK_FILE
    if file.is_file():
        state = load(file)
        named = state.get("mask_token_id", number) if isinstance(state, dict) else number
        value = state.get("embedding") if isinstance(state, dict) else state
        if named != number or not isinstance(value, Tensor) or not value.is_floating_point():
            raise CheckpointError(
                f"{file}: expected: the embedding of mask_token_id={number}, as {CONFIG_FILE} says; copy both again"
            )
        return value.reshape(-1), MASK_FILE
    place, name = (found, EMBEDDINGS) if EMBEDDINGS in found.files else (theirs, theirs.ending(EMBEDDINGS))
    if name is None or number >= place.shape(name)[0]:
        rows = f"{place.shape(name)[0]} rows" if name else "none"
        raise CheckpointError(
            f"{found.folder}: mask_token_id={number}, but of embeddings {place.folder} has {rows}; name the target it "
            "was trained on"
        )
    owner = "its own" if place is found else "the target's"
    return place.read(name, number, number + 1)[0], f"row {number} of {owner} embeddings"


def _size(folder: Path, tensors: dict[str, Tensor], name: str) -> int:
    if name not in tensors or tensors[name].dim() < 1:
        raise CheckpointError(f"{folder}: has no {name.removeprefix('backbone.')}; copy it again")
    return len(tensors[name])


def _check_shapes(folder: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise CheckpointError unless the tensors are those that config.json asks for."""
    if missing := sorted(expected.keys() - tensors.keys()):
        raise CheckpointError(f"{folder}: tensor(s) missing: {_theirs(missing)}; copy it again")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise CheckpointError(
            f"{folder}: tensor(s) that a draft layer here has not: {_theirs(unknown)}; convert a drafter without"
        )
    for name, value in expected.items():
        if (given := tuple(tensors[name].shape)) != tuple(value.shape):
            raise CheckpointError(
                f"{folder}: {_theirs([name])} is {given}; {CONFIG_FILE} and the target ask for {tuple(value.shape)}; "
                "name the target it was trained on, or copy it again"
            )


def _theirs(names: list[str]) -> str:
    """The first of some tensors, by the drafter's names."""
    return ", ".join(name.removeprefix("backbone.") for name in names[:4])
