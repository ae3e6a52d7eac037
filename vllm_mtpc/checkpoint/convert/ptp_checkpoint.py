"""Convert a PTP checkpoint of the paper's authors.

Their code writes Lightning checkpoints, with two layouts of `state_dict`:

    official   model.model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight, model.u_embed.*
    fork       student.model.base_model..., student.u_adapter.* (older; may hold a teacher, too)

Weights of the target are left out: a head uses its target's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.convert.source import ConvertOptions, target_config, to_peft_names
from vllm_mtpc.checkpoint.load import check_shapes, shapes_of
from vllm_mtpc.checkpoint.metadata import converted_card
from vllm_mtpc.checkpoint.ptp_head import save_ptp
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import check_lengths
from vllm_mtpc.heads.ptp.embedding import build_embedding

# prefixes of the model that drafts and of its u-embedding
LAYOUTS = {"official": ("model.", "model.u_embed."), "fork": ("student.", "student.u_adapter.")}
# by our name of the u-embedding, the names of its tensors: theirs -> ours
EMBEDDINGS = {
    "ieee": {"u_adapter.weight": "outer.weight", "u_adapter.bias": "outer.bias"},
    "interpolation": {"embedding.weight": "rows"},
}
ROUND_ROWS = 32  # rows of their embedding `round`, which is not supported; `interpolation` has fewer


def convert_ptp(options: ConvertOptions, content: Mapping[str, Any]) -> str:
    """Convert a PTP checkpoint with this `content` as `convert`."""
    path, target, state = options.ckpt, target_config(options.target), content["state_dict"]
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: its 'state_dict' is not a dict; name a checkpoint of Lightning (.ckpt)")
    state = {name: value for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)}
    check_lengths(path, state)
    layouts = [name for name, (_, prefix) in LAYOUTS.items() if any(key.startswith(prefix) for key in state)]
    if len(layouts) != 1:
        prefixes = " or ".join(f"{prefix}*" for _, prefix in LAYOUTS.values())
        raise CheckpointError(
            f"{path}: has {len(layouts) or 'no'} u-embeddings; allowed: one, {prefixes}; name another PTP checkpoint"
        )
    student, prefix = LAYOUTS[layouts[0]]
    lora = to_peft_names(path, {n: value for n, value in state.items() if n.startswith(student) and ".lora_" in n})
    ranks = [next(iter(value.shape), 0) for name, value in lora.items() if ".lora_A." in name]
    if not ranks:
        raise CheckpointError(
            f"{path}: has no adapters (lora_A, lora_B): the model's own weights were trained, but a PTP head uses its "
            "target's; convert a checkpoint trained with LoRA"
        )
    u_embedding, u_embed = _read_embedding(path, state, prefix)
    config = PtpConfig.create(
        variant=options.variant,
        window=options.window,
        u_embedding=u_embedding,
        u_features=len(u_embed["rows"]) if "rows" in u_embed else None,
        lora_rank=ranks[0],
        lora_alpha=options.lora_alpha,
        **options.config_fields(target),
    )
    with torch.device("meta"):
        embedding = build_embedding(u_embedding, config.hidden_size, config.u_features, config.u_hidden)
    check_shapes(path, shapes_of(u_embed), shapes_of(embedding.state_dict()), f"{u_embedding} of this target")
    embedding.load_state_dict(u_embed, assign=True)
    is_half = all(value.dtype is torch.float16 for value in [*lora.values(), *u_embed.values()])
    progress = {key: content[key] for key in ("epoch", "global_step") if isinstance(content.get(key), int)}
    settings = options.model_dump(mode="json", include={"variant", "lora_alpha", "temperature", "top_k", "top_p"})
    record = {"from": path.name, "layout": layouts[0], **progress, "settings": settings}
    card = converted_card(config, f"PTP head: {config.variant}, n={config.window}", path.name)
    dtype = torch.float16 if is_half else torch.float32
    save_ptp(options.out, config, lora, embedding, {"converted": record}, card, dtype)
    return f"{config.variant}, {config.u_embedding}, window {config.window}"


def _read_embedding(path: Path, state: Mapping[str, Tensor], prefix: str) -> tuple[str, dict[str, Tensor]]:
    """Return the name of the u-embedding, and its tensors by our names."""
    given = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    name = next((name for name, theirs in EMBEDDINGS.items() if theirs.keys() == given.keys()), None)
    if name is None:
        raise CheckpointError(
            f"{path}: u-embedding of {', '.join(sorted(given))} below {prefix}; allowed: "
            f"{' or '.join(' and '.join(theirs) for theirs in EMBEDDINGS.values())}; convert another checkpoint"
        )
    tensors = {ours: given[theirs] for theirs, ours in EMBEDDINGS[name].items()}
    if name == "interpolation" and (tensors["rows"].dim() != 2 or len(tensors["rows"]) == ROUND_ROWS):
        raise CheckpointError(
            f"{path}: a u-embedding of shape {tuple(tensors['rows'].shape)}; allowed: [rows, D], and not "
            f"{ROUND_ROWS} rows, which are their `round`, which is not supported; convert another checkpoint"
        )
    return name, tensors
