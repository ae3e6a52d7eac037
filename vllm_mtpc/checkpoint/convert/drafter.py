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

from vllm_mtpc.checkpoint.convert.drafter_config import DrafterConfig, read_drafter
from vllm_mtpc.checkpoint.convert.source import MASK_FILE, ConvertOptions, load_tensors, narrowest_dtype, target_config
from vllm_mtpc.checkpoint.load import check_shapes, shapes_of
from vllm_mtpc.checkpoint.locate import CONFIG_FILE, download, verifier_name
from vllm_mtpc.checkpoint.metadata import converted_card
from vllm_mtpc.checkpoint.save import save_head
from vllm_mtpc.checkpoint.shards import Shards
from vllm_mtpc.config.mtpc_config import HeadConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import read_json
from vllm_mtpc.heads import build_head

EMBEDDINGS, LM_HEAD = "embed_tokens.weight", "lm_head.weight"
MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
_LEFT_OUT = re.compile(r"confidence_head\..*|verifier_(norm|lm_head)\.weight")


def convert_drafter(options: ConvertOptions, label: str) -> str:
    """Convert the drafter in the folder `options.ckpt` as `convert`; `label` is its name for provenance."""
    folder, target = options.ckpt, target_config(options.target)
    given = read_drafter(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE), target)
    source, place = Shards(folder), Path(options.target)
    target_shards = Shards(place if place.is_dir() else download(options.target, "target"))
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
        backbone_layers=given.num_hidden_layers,
        backbone_heads=given.num_attention_heads,
        backbone_kv_heads=given.num_key_value_heads,
        backbone_theta=float(given.rope_parameters.rope_theta),
        backbone_eps=float(given.rms_norm_eps),
        backbone_head_dim=source.read("layers.0.self_attn.q_norm.weight").shape[0],
        backbone_width=source.read("layers.0.mlp.gate_proj.weight").shape[0],
        aux_hidden_state_layer_ids=given.layer_ids,
        sample_from_anchor=given.starts_at_anchor,
        **options.trained_sampling,
    )
    with torch.device("meta"):
        head = build_head(config)
    check_shapes(folder, shapes_of(tensors), shapes_of(head.state_dict()), f"{CONFIG_FILE} and the target")
    head.load_state_dict(tensors, assign=True)
    record = {"from": label, "layout": given.layout, "trained_on": given.trained_on, "mask": mask_source}
    title = f"{'DSpark' if given.markov_rank else 'DFlash'} drafter as a backbone head: n={config.window}"
    card, dtype = converted_card(config, title, label), narrowest_dtype(tensors.values())
    save_head(options.out, config, head, {"converted": {**record, "left_out": left_out}}, card, dtype)
    return f"{config.circuit}, backbone, window {config.window}; left out: {', '.join(left_out) or 'nothing'}"


def _read_tensors(given: DrafterConfig, source: Shards, vocab_size: int) -> tuple[dict[str, Tensor], list[str]]:
    """Return the head's tensors except the mask, and the names of tensors left out. Embeddings are not read."""
    tensors, left_out = {}, []
    for name in sorted(source.files.keys() - {EMBEDDINGS, LM_HEAD}):
        if _LEFT_OUT.fullmatch(name) or (name in MARKOV and not given.markov_rank):
            left_out.append(name)
        elif name not in MARKOV:  # an unknown one is refused with the shapes of all
            tensors[f"backbone.{name}"] = source.read(name)
    if given.markov_rank:
        w1, w2 = (source.read(name) for name in MARKOV)
        tensors["token_source"] = w1[:vocab_size]  # it may have more rows than the target has ids
        tensors["token_target"] = w2.T[None].repeat(given.window - 1, 1, 1)
    return tensors, left_out


def _compare_with_target(
    given: DrafterConfig, source: Shards, target_shards: Shards, target: dict[str, Any]
) -> list[str]:
    """Return which of embeddings and lm_head the drafter has. Raises CheckpointError if one is not the target's.

    The mask's row may differ: it is read from the drafter. Rows after the vocabulary are padding.
    """
    equal, size = [], (target["vocab_size"], target["hidden_size"])
    for name in source.files.keys() & {EMBEDDINGS, LM_HEAD}:
        a, b = source.read(name), target_shards.read(_target_name(target_shards, name, target))
        if any(tensor.dim() != 2 or len(tensor) < size[0] or tensor.shape[1] != size[1] for tensor in (a, b)):
            raise CheckpointError(
                f"{source.folder}: {name} is {tuple(a.shape)}, the target's {tuple(b.shape)}; allowed: {size}; name "
                "the target it was trained on"
            )
        narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
        is_other = (a[: size[0]].to(narrow) != b[: size[0]].to(narrow)).any(dim=1)
        if name == EMBEDDINGS:
            is_other[given.mask_token_id : given.mask_token_id + 1] = False
        if (differing := int(is_other.sum())) > 0:
            raise CheckpointError(
                f"{source.folder}: {name} is not the target's: {differing} of {size[0]} rows differ, row "
                f"{int(is_other.nonzero()[0])} first; name the target it was trained on, or convert a drafter that "
                "did not train its embeddings and lm_head"
            )
        equal.append(f"{name} (the target's)")
    return sorted(equal)


def _target_name(target_shards: Shards, name: str, target: dict[str, Any]) -> str:
    found = target_shards.find_suffix(name)
    if found is None and name == LM_HEAD and target.get("tie_word_embeddings", True):
        found = target_shards.find_suffix(EMBEDDINGS)
    if found is None:
        raise CheckpointError(f"{target_shards.folder}: has no single {name}; name the target it was trained on")
    return found


def _read_mask(given: DrafterConfig, source: Shards, target_shards: Shards) -> tuple[Tensor, str]:
    """Return the input of the first layer for a mask, [D], and its source."""
    number, file = given.mask_token_id, source.folder / MASK_FILE
    if file.is_file():
        state = load_tensors(file)
        state = state if isinstance(state, dict) else {"embedding": state}
        value = state.get("embedding")
        if state.get("mask_token_id", number) != number or not isinstance(value, Tensor):
            raise CheckpointError(f"{file}: expected: the embedding of mask_token_id={number}; copy the drafter again")
        return value.reshape(-1), MASK_FILE
    place, owner = (source, "its own") if EMBEDDINGS in source.files else (target_shards, "the target's")
    rows = place.read(_target_name(place, EMBEDDINGS, {}))
    if number >= len(rows):
        raise CheckpointError(
            f"{source.folder}: mask_token_id={number}, but the embeddings of {place.folder} have {len(rows)} rows; "
            "name the target it was trained on"
        )
    return rows[number], f"row {number} of {owner} embeddings"
