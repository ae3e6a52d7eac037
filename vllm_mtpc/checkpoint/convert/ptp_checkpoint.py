"""Convert a PTP checkpoint of the paper's authors.

Their code writes Lightning checkpoints, with two layouts of `state_dict`:

    official   model.model.base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight, model.u_embed.*
    fork       student.model.base_model..., student.u_adapter.* (older; may hold a teacher, too)

Weights of the target are left out: a head uses its target's own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_mtpc.checkpoint.convert.source import ConvertOptions, load_tensors, target_config, to_peft_names
from vllm_mtpc.checkpoint.load import check_shapes, shapes_of
from vllm_mtpc.checkpoint.locate import verifier_name
from vllm_mtpc.checkpoint.metadata import converted_card
from vllm_mtpc.checkpoint.ptp_head import save_ptp
from vllm_mtpc.config.ptp_config import PtpConfig
from vllm_mtpc.errors import CheckpointError
from vllm_mtpc.files import check_lengths
from vllm_mtpc.heads.ptp.embedding import AuxEmbedding, build_embedding

DEFAULT_WINDOW = 16  # auxiliary rows that the authors train
# prefixes of the model that drafts and of its u-embedding
LAYOUTS = {"official": ("model.", "model.u_embed."), "fork": ("student.", "student.u_adapter.")}
ROUND_ROWS = 32  # rows of their embedding `round`, which is not supported; `interpolation` has fewer


class _Layout(NamedTuple):
    """Tensors of the authors' u-embeddings."""

    name: str  # our name of the embedding
    names: dict[str, str]  # of tensors: theirs -> ours
    counted: int | None  # dimension of `embedding.weight` that counts features or rows


_EMBEDDINGS = (
    _Layout("ieee", {"u_adapter.weight": "outer.weight", "u_adapter.bias": "outer.bias"}, None),
    _Layout("interpolation", {"embedding.weight": "rows"}, 0),
)


def convert_ptp(options: ConvertOptions, content: Mapping[str, Any]) -> PtpConfig:
    """Write the head folder `options.out` of a PTP checkpoint.

    Args:
        options: Of the conversion.
        content: Of the file `options.ckpt`.

    Returns:
        The config of the head.

    Raises:
        CheckpointError: The checkpoint has something that a head cannot have, or is of another target.
        HeadConfigError: Its settings are not possible for a head.
    """
    path, target, state = options.ckpt, target_config(options.target), content["state_dict"]
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: its 'state_dict' is not a dict; name a checkpoint of Lightning (.ckpt)")
    state = {name: value for name, value in state.items() if isinstance(name, str) and isinstance(value, Tensor)}
    check_lengths(path, state)
    layout = _find_layout(path, state)
    lora = _read_adapters(path, state, LAYOUTS[layout][0])
    u_embedding, features, tensors = _read_embedding(options, state, LAYOUTS[layout][1])
    counts = None if options.histogram is None else _read_histogram(options.histogram)
    window = options.window or (len(counts) - 1 if counts else DEFAULT_WINDOW)
    config = PtpConfig.create(
        variant=options.variant,
        window=window,
        target=target,
        verifier=verifier_name(options.target, options.out),
        u_embedding=u_embedding,
        u_features=features,
        lora_rank=next((*value.shape, 0)[0] for name, value in sorted(lora.items()) if ".lora_A." in name),
        lora_alpha=options.lora_alpha,
        accepted=counts and accepted_drafts(counts, window),
        **options.trained_sampling,
    )
    if counts and config.accepted is None:
        print(
            f"warning: {options.histogram} counts up to {len(counts) - 1} tokens, window is {window}: left out",
            file=sys.stderr,
        )
    is_half = all(value.dtype is torch.float16 for value in [*lora.values(), *tensors.values()])
    progress = {key: content[key] for key in ("epoch", "global_step") if isinstance(content.get(key), int)}
    settings = options.model_dump(mode="json", include={"variant", "lora_alpha", "temperature", "top_k", "top_p"})
    record = {"from": path.name, "layout": layout, **progress, "settings": settings}
    card = converted_card(config, f"PTP head: {config.variant}, n={config.window}", path.name)
    embedding = _build_embedding(path, config, tensors)
    dtype = torch.float16 if is_half else torch.float32
    save_ptp(options.out, config, lora, embedding, {"converted": record}, card, dtype)
    return config


def accepted_drafts(counts: list[float], window: int) -> list[float] | None:
    """Return P(exactly g of the n - 1 drafts are accepted), g = 0 to n - 1, of the authors' histogram.

    The authors count the window's first token as well, which serving takes from the target:
    P(g drafts) = P(1 + g correct) / P(at least 1 correct). Counts beyond `window` are merged, which is exact, because
    rows depend on earlier rows only.

    Args:
        counts: Shares of windows with 0, 1, ... leading correct tokens.
        window: n.

    Returns:
        n probabilities; None if `counts` is shorter than the window.
    """
    later = counts[1:]
    total = sum(later)
    if len(later) < window or total <= 0:
        return None
    kept = [share / total for share in later]
    return [*kept[: window - 1], sum(kept[window - 1 :])]


def _find_layout(path: Path, state: Mapping[str, Tensor]) -> str:
    """Return the layout of the file's u-embedding."""
    found = [name for name, (_, prefix) in LAYOUTS.items() if any(key.startswith(prefix) for key in state)]
    if len(found) != 1:
        prefixes = " or ".join(f"{prefix}*" for _, prefix in LAYOUTS.values())
        raise CheckpointError(
            f"{path}: has {len(found) or 'no'} u-embeddings; allowed: one, {prefixes}; name another PTP checkpoint"
        )
    return found[0]


def _read_adapters(path: Path, state: Mapping[str, Tensor], student: str) -> dict[str, Tensor]:
    """Return the student's adapters by PEFT's names on disk."""
    lora = {name: value for name, value in state.items() if name.startswith(student) and ".lora_" in name}
    lora = to_peft_names(path, lora)
    if not any(".lora_A." in name for name in lora):
        raise CheckpointError(
            f"{path}: has no adapters (lora_A, lora_B): the model's own weights were trained, but a PTP head uses its "
            "target's; convert a checkpoint trained with LoRA"
        )
    return lora


def _read_embedding(
    options: ConvertOptions, state: Mapping[str, Tensor], prefix: str
) -> tuple[str, int | None, dict[str, Tensor]]:
    """Return the name of the u-embedding, its features, and its tensors by our names."""
    given = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    layout = next((known for known in _EMBEDDINGS if known.names.keys() == given.keys()), None)
    if layout is None or any(value.dim() != (1 if name.endswith("bias") else 2) for name, value in given.items()):
        known = " or ".join(" and ".join(known.names) for known in _EMBEDDINGS)
        raise CheckpointError(
            f"{options.ckpt}: u-embedding of {', '.join(sorted(given))} below {prefix}; allowed: {known}"
        )
    count = None if layout.counted is None else given["embedding.weight"].shape[layout.counted]
    if layout.name == "interpolation" and count == ROUND_ROWS:
        raise CheckpointError(
            f"{options.ckpt}: a u-embedding of {count} rows is their `round`, which is not supported; convert a "
            "checkpoint with another u-embedding"
        )
    if options.u_embedding not in (None, layout.name):
        raise CheckpointError(
            f"{options.ckpt}: the u-embedding's tensors are those of {layout.name}, not {options.u_embedding}; type "
            f"--u-embedding {layout.name}"
        )
    return layout.name, count, {ours: given[name] for name, ours in layout.names.items()}


def _build_embedding(path: Path, config: PtpConfig, tensors: dict[str, Tensor]) -> AuxEmbedding:
    with torch.device("meta"):
        embedding = build_embedding(config.u_embedding, config.hidden_size, config.u_features, config.u_hidden)
    check_shapes(path, shapes_of(tensors), shapes_of(embedding.state_dict()), f"{config.u_embedding} of this target")
    embedding.load_state_dict(tensors, assign=True)
    return embedding


def _read_histogram(path: Path) -> list[float]:
    """Return the shares of windows with 0, 1, ... leading correct tokens."""
    counts = load_tensors(path)
    is_list = isinstance(counts, torch.Tensor) and counts.dim() == 1 and counts.numel() >= 3
    if not is_list or not bool(torch.isfinite(counts).all()) or bool((counts < 0).any()) or counts.sum() <= 0:
        raise CheckpointError(
            f"{path}: not a histogram; expected: one share of 0 or more for each number of correct tokens"
        )
    return (counts.double() / counts.double().sum()).tolist()
